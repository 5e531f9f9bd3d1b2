"""From logits to tokens: choose a token after every position, accept the drafts that equal it, report logprobs.

The target's token at a position is a function of logits, seed and output position alone
(:mod:`engine.sampling.choose`), and a draft is accepted while it equals that token. So drafts change no output,
greedy or sampled, and the output has exactly the target's distribution. A drafter that draws with the same noise
(:meth:`engine.contracts.drafter.DraftEngine.choose`) has its drafts accepted more often than the most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.contracts.request import TokenLogprobs
from engine.kernels.torch.reference import NOT_FINITE
from engine.kernels.transfer import upload
from engine.sampling.adjust import adjust_
from engine.sampling.choose import choose
from engine.sampling.logprobs import Ranked, listed, rank
from engine.sampling.state import SamplingBatch, SamplingState


@dataclass(frozen=True, slots=True)
class Choice:
    """What a batch of ``R`` requests came to, on the device."""

    num_drafts: tuple[int, ...]
    """Of each request, verified here."""
    tokens: Tensor
    """int64 ``[sum(1 + num_drafts)]``, or at least ``[R * queries]``: the target's token after every position, request
    by request. Up to the last accepted draft these are the drafts themselves, then comes the new token; what follows
    means nothing. ``NOT_FINITE`` (-1) where logits are broken."""
    accepted: Tensor
    """int64 ``[R]``: accepted drafts"""
    ranked: tuple[tuple[tuple[int, ...], Ranked], ...] = ()
    """Requests that want the same number of logprobs, and these for all their positions."""
    queries: int | None = None
    """Entries of ``tokens`` per request where all have as many, used or not; ``None``: ``1 + num_drafts``."""
    own: tuple[tuple[int, ...], Tensor] | None = None
    """Requests that want logprobs of their tokens alone, and float32 logprobs of all ``tokens``."""
    together: Tensor | None = None
    """int64: ``tokens``, then ``accepted`` or more, where they lie so in memory: one copy brings both to the host."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What :func:`results` needs on the host."""
        chosen = (self.tokens, self.accepted) if self.together is None else (self.together,)
        ranked = (tensor for _, ranked in self.ranked for tensor in ranked)
        return (*chosen, *ranked, *(() if self.own is None else self.own[1:]))


@dataclass(frozen=True, slots=True)
class Verified:
    """What a request came to: the accepted drafts and one more token, or an error and nothing."""

    tokens: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when the request asked, else empty."""
    error: str = ""
    """Why there are no tokens; concerns this request only."""


def choose_tokens(
    logits: Tensor, batch: SamplingBatch, state: SamplingState, text: Tensor, longest: int, on_triton: bool = False
) -> tuple[Tensor, Tensor]:
    """The target's token at every position, int64 ``[N]``, and the adjusted logits. ``logits``: float32 ``[N, V]``,
    changed in place. ``text``, ``longest``: as in :func:`engine.sampling.adjust.adjust_`. ``on_triton``: by kernels."""
    if batch.features.adjusts:
        adjust_(logits, batch, state, text, longest, on_triton)
    if on_triton:
        from engine.sampling.triton.sampler import sample_on_device  # Triton is imported only where it runs

        return sample_on_device(logits, batch), logits
    return choose(logits, batch), logits


def accepted_drafts(inputs: Tensor, tokens: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts of each row are accepted: int64 ``[R]``, on the device.

    ``inputs``: int64 ``[R, Q]``, each row's last token and its drafts, of which it has ``num_drafts [R]``;
    ``tokens``: the target's token after each, of the same shape.
    """
    draft = torch.arange(1, inputs.shape[1], device=inputs.device)
    equal = (inputs[:, 1:] == tokens[:, :-1]) & (draft <= num_drafts[:, None])
    return equal.to(torch.int64).cumprod(dim=1).sum(dim=1)


def accepted_of(inputs: Tensor, tokens: Tensor, num_drafts: Sequence[int]) -> Tensor:
    """:func:`accepted_drafts` of requests one after another: ``inputs`` and ``tokens`` int64
    ``[sum(1 + num_drafts)]``."""
    device, most = inputs.device, max(num_drafts)
    if most == 0:
        return torch.zeros(len(num_drafts), dtype=torch.int64, device=device)
    if all(count == most for count in num_drafts):
        shape = (len(num_drafts), most + 1)
        return accepted_drafts(inputs.view(shape), tokens.view(shape), torch.full(shape[:1], most, device=device))
    starts = accumulate((1 + count for count in num_drafts[:-1]), initial=0)
    begin, count = upload((*starts, *num_drafts), torch.int64, device).view(2, -1).unbind()
    grid = (begin[:, None] + torch.arange(most + 1, device=device)).clamp_(max=len(inputs) - 1)
    return accepted_drafts(inputs[grid], tokens[grid], count)


def _starts(num_drafts: Sequence[int], queries: int | None) -> list[int]:
    """Where each request's entries of :attr:`Choice.tokens` begin."""
    return list(accumulate((queries or 1 + count for count in num_drafts[:-1]), initial=0))


def rank_tokens(
    logits: Tensor,
    tokens: Tensor,
    num_drafts: Sequence[int],
    wanted: Sequence[int | None],
    queries: int | None = None,
) -> tuple[tuple[tuple[int, ...], Ranked], ...]:
    """:attr:`Choice.ranked`; requests that want the same number of alternatives share the work. ``wanted[i]``:
    ``None`` for no logprobs. ``queries``: see :attr:`Choice.queries`."""
    by_top: dict[int, list[int]] = {}
    for i, top in enumerate(wanted):
        if top is not None:
            by_top.setdefault(top, []).append(i)
    starts, found = _starts(num_drafts, queries), []
    for top, members in by_top.items():
        where = [starts[i] + j for i in members for j in range(1 + num_drafts[i])]
        index = upload(where, torch.int64, logits.device)
        found.append((tuple(members), rank(logits[index], tokens[index], top)))
    return tuple(found)


def results(choice: Choice, tensors: Sequence[Tensor]) -> list[Verified]:
    """What each request came to. ``tensors``: :attr:`Choice.tensors`, in host memory."""
    if choice.together is not None:
        count, requests = len(choice.tokens), len(choice.num_drafts)
        tensors = (tensors[0][:count], tensors[0][count : count + requests], *tensors[1:])
    tokens: list[int] = tensors[0].tolist()
    accepted: list[int] = tensors[1].tolist()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    for number, (members, _) in enumerate(choice.ranked):
        entries, begin = listed(*tensors[2 + 4 * number : 6 + 4 * number]), 0
        for i in members:
            logprobs[i] = tuple(entries[begin : begin + accepted[i] + 1])
            begin += choice.num_drafts[i] + 1
    starts = _starts(choice.num_drafts, choice.queries)
    if choice.own is not None:
        own: list[float] = tensors[-1].tolist()
        for i in choice.own[0]:
            indices = range(starts[i], starts[i] + accepted[i] + 1)
            logprobs[i] = tuple(TokenLogprobs(tokens[at], own[at]) for at in indices)
    found = []
    for i, (begin, count) in enumerate(zip(starts, accepted, strict=True)):
        output = tuple(tokens[begin : begin + count + 1])
        if output[-1] == NOT_FINITE:
            found.append(Verified((), 0, error="the model produced logits that are not finite numbers"))
        else:
            found.append(Verified(output, count, logprobs.get(i, ())))
    return found
