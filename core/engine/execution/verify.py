"""From logits to tokens: verify drafts, sample one more, report logprobs.

Three ways to judge a drafted chain, all exact:

* greedy: a draft stands while it is the most likely token;
* shared noise: the target's token at each position is a function of logits, seed and output position alone; a draft
  stands while it equals that token. Used for seeded requests and for drafts that came without probabilities, so a
  seed gives one output whatever the drafter or width;
* rejection sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318) for unseeded requests whose
  drafter says how it sampled: a draft ``d`` stands with probability ``min(1, p(d) / q(d))``, and the first that
  falls is replaced by a draw from the normalised positive part of ``p - q``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.request import SamplingParams, TokenLogprobs
from engine.execution.adjust import adjust, adjusts
from engine.execution.logprobs import Ranked, listed, rank
from engine.execution.philox import ACCEPT, RESIDUAL, uniform
from engine.execution.positions import Position, TableRow, streams
from engine.execution.sampling import NOT_FINITE, choose, draw_from_weights, target_probs
from engine.execution.transfer import download, upload


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One request that gets tokens in this step."""

    params: SamplingParams
    seed: int
    """Resolved, 64-bit."""
    first_output: int
    """Output position (0-based) of the first token to be sampled here."""
    prompt_len: int
    history: Tensor
    """int64 ``[known]`` on the device: every token so far, prompt and output. Read only for penalties."""
    stop_ids: tuple[int, ...]
    """Cannot be sampled while the output is shorter than ``min_tokens``."""
    drafts: tuple[int, ...] = ()
    draft_probs: Tensor | None = None
    """float32 ``[>= len(drafts), V]``: the probabilities the drafts were sampled with."""
    row: TableRow | None = None
    """As :attr:`Position.row <engine.execution.positions.Position.row>`."""

    @property
    def is_plain(self) -> bool:
        """Takes the most likely tokens of logits as they are, and asks for nothing else."""
        params = self.params
        too_short = self.first_output < params.min_tokens and bool(self.stop_ids)
        return params.temperature == 0.0 and params.logprobs is None and not (too_short or adjusts(params))

    @property
    def uses_rejection(self) -> bool:
        return (
            self.draft_probs is not None
            and bool(self.drafts)
            and self.params.seed is None
            and self.params.temperature != 0.0
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """What a row came to: the accepted drafts and one more token, or an error and nothing."""

    tokens: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...]
    """One per token when the request asked, else empty."""
    error: str = ""
    """Why this row has no tokens; concerns this request only."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a batch of rows came to, perhaps still on the device."""

    rows: tuple[VerifyRow, ...]
    tokens: Tensor
    """int64 ``[sum(1 + len(row.drafts))]``: the target's token after every position. Up to the last accepted draft
    these are the drafts themselves, then comes the row's new token; what follows means nothing. ``NOT_FINITE`` (-1)
    where logits are broken."""
    ranked: tuple[tuple[tuple[int, ...], Ranked], ...]
    """Rows that want the same number of logprobs, and these for all their positions."""
    settled: Mapping[int, tuple[int, ...]]
    """Rows judged by rejection sampling, which asks the host: their accepted drafts and new token."""


def choose_tokens(logits: Tensor, rows: Sequence[VerifyRow], *, on_triton: bool = False) -> Choice:
    """The device's part of :func:`verify`. Waits for the device only if a row uses rejection sampling.

    ``on_triton``: penalise and choose with the kernels of :mod:`engine.execution.device_sampling`.
    """
    positions = _positions(rows)
    assert len(logits) == len(positions)
    adjusted = adjust(logits, positions, on_triton=on_triton)
    starts = _starts(rows)
    rejecting = [i for i, row in enumerate(rows) if row.uses_rejection]
    settled: dict[int, tuple[int, ...]] = {}
    if rejecting:
        settled = _verify_by_rejection(adjusted, positions, rows, starts, rejecting)
    choose_all = choose
    if on_triton:
        from engine.execution.device_sampling import choose_on_device  # Triton is imported only where it runs

        choose_all = choose_on_device
    tokens = _target_tokens(adjusted, positions, rows, starts, settled, choose_all)
    return Choice(tuple(rows), tokens, _ranked(adjusted, tokens, rows, starts), settled)


def judge(choice: Choice) -> list[Verified]:
    """The host's part of :func:`verify`: which drafts stand. All tensors of ``choice`` are in host memory."""
    tokens: list[int] = choice.tokens.tolist()
    outputs: list[tuple[int, ...]] = []
    at = 0
    for i, row in enumerate(choice.rows):
        target = tokens[at : at + len(row.drafts) + 1]
        at += len(target)
        outputs.append(choice.settled.get(i) or _standing(row.drafts, target))
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    for members, ranked in choice.ranked:
        entries = listed(*ranked)
        at = 0
        for i in members:
            logprobs[i] = tuple(entries[at : at + len(outputs[i])])
            at += len(choice.rows[i].drafts) + 1
    return [_result(output, logprobs.get(i, ())) for i, output in enumerate(outputs)]


def _standing(drafts: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """The drafts that equal the target's tokens, and the target's next token."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == target[accepted]:
        accepted += 1
    return tuple(target[: accepted + 1])


def standing_drafts(inputs: Tensor, tokens: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts of each row stand, as :func:`judge` finds by comparing tokens: int64 ``[rows]``, on the device.

    ``inputs``: int64 ``[rows, queries]``, each row's last token and its drafts, of which it has ``num_drafts [rows]``;
    ``tokens``: the target's token after each, of the same shape.
    """
    position = torch.arange(1, inputs.shape[1], device=inputs.device)
    stands = (inputs[:, 1:] == tokens[:, :-1]) & (position <= num_drafts[:, None])
    return stands.to(torch.int64).cumprod(dim=1).sum(dim=1)


def verify(logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
    """Judge the drafts of every row and sample the token after the last accepted one.

    ``logits``: float32 ``[sum(1 + len(row.drafts)), V]``, rows one after another; entry ``j`` of a row predicts its
    ``j``-th draft (the last one what follows all drafts).
    """
    choice = choose_tokens(logits, rows)
    return judge(on_host(choice, download(tensors_of(choice)).wait()))


def tensors_of(choice: Choice) -> tuple[Tensor, ...]:
    """What :func:`judge` needs on the host."""
    return (choice.tokens, *(tensor for _, ranked in choice.ranked for tensor in ranked))


def on_host(choice: Choice, tensors: Sequence[Tensor]) -> Choice:
    """``choice`` with :func:`tensors_of` replaced by their copies."""
    ranked = tuple(
        (members, (tensors[at], tensors[at + 1], tensors[at + 2], tensors[at + 3]))
        for at, (members, _) in zip(range(1, len(tensors), 4), choice.ranked, strict=True)
    )
    return replace(choice, tokens=tensors[0], ranked=ranked)


def _positions(rows: Sequence[VerifyRow]) -> list[Position]:
    return [
        Position(
            row.params,
            row.seed,
            row.first_output + j,
            row.prompt_len,
            row.history,
            row.stop_ids,
            row.drafts[:j],
            row.row,
        )
        for row in rows
        for j in range(len(row.drafts) + 1)
    ]


def _starts(rows: Sequence[VerifyRow]) -> list[int]:
    starts, total = [], 0
    for row in rows:
        starts.append(total)
        total += len(row.drafts) + 1
    return starts


def _target_tokens(
    adjusted: Tensor,
    positions: Sequence[Position],
    rows: Sequence[VerifyRow],
    starts: Sequence[int],
    settled: Mapping[int, tuple[int, ...]],
    choose_all: Callable[[Tensor, Sequence[Position]], Tensor],
) -> Tensor:
    """:attr:`Choice.tokens`."""
    if not settled:
        return choose_all(adjusted, positions)
    tokens = torch.zeros(len(positions), dtype=torch.int64, device=adjusted.device)
    shared = [starts[i] + j for i in range(len(rows)) if i not in settled for j in range(len(rows[i].drafts) + 1)]
    if shared:
        index = upload(shared, torch.int64, adjusted.device)
        tokens[index] = choose_all(adjusted[index], [positions[at] for at in shared])
    known = [(starts[i] + j, token) for i, output in settled.items() for j, token in enumerate(output)]
    places, values = (upload(column, torch.int64, adjusted.device) for column in zip(*known, strict=True))
    tokens[places] = values
    return tokens


def _verify_by_rejection(
    adjusted: Tensor,
    positions: Sequence[Position],
    rows: Sequence[VerifyRow],
    starts: Sequence[int],
    which: Sequence[int],
) -> dict[int, tuple[int, ...]]:
    """Accepted drafts and the new token of the rows ``which``; waits for the device."""
    device = adjusted.device
    wanted = [starts[i] + j for i in which for j in range(len(rows[i].drafts) + 1)]
    chosen = [positions[w] for w in wanted]
    logits = adjusted[upload(wanted, torch.int64, device)]
    finite = logits.amax(dim=-1).isfinite()
    p = target_probs(logits, chosen)
    q = _proposals([rows[i] for i in which], p)
    # The position after all drafts has no proposal: q is 0 there, nothing stands, and the draw is from p itself.
    drafts = upload([d for i in which for d in (*rows[i].drafts, 0)], torch.int64, device)[:, None]
    coin = uniform(*streams(chosen, device), ACCEPT, 1)
    stands = (coin * q.gather(1, drafts) < p.gather(1, drafts)).squeeze(1)
    verdicts: list[tuple[bool, bool]] = list(zip(stands.tolist(), finite.tolist()))
    ends: list[int] = []
    accepted: list[tuple[int, ...]] = []
    at = 0
    for i in which:
        width, end = len(rows[i].drafts), at
        while end < at + width and all(verdicts[end]):
            end += 1
        accepted.append(rows[i].drafts[: end - at])
        ends.append(end)
        at += width + 1
    replacements = _replace(p, q, chosen, ends)
    return {
        i: (*standing, token if verdicts[end][1] else NOT_FINITE)
        for i, standing, end, token in zip(which, accepted, ends, replacements, strict=True)
    }


def _proposals(rows: Sequence[VerifyRow], like: Tensor) -> Tensor:
    """Proposal probabilities by position, float32 ``[N, V]``, with a row of zeros after each chain."""
    q = torch.zeros_like(like)
    at = 0
    for row in rows:
        assert row.draft_probs is not None
        width = len(row.drafts)
        q[at : at + width] = row.draft_probs[:width]
        at += width + 1
    return q


def _replace(p: Tensor, q: Tensor, positions: Sequence[Position], ends: Sequence[int]) -> list[int]:
    """A token for the position that ended each chain, drawn from the positive part of ``p - q``."""
    index = upload(ends, torch.int64, p.device)
    target = p[index]
    residual = (target - q[index]).clamp_(min=0.0)
    # p and q equal up to rounding leave nothing over; then p is the residual's limit.
    empty = residual.amax(dim=-1, keepdim=True) <= 0
    weights = torch.where(empty, target, residual)
    drawn: list[int] = draw_from_weights(weights, [positions[e] for e in ends], RESIDUAL).tolist()
    return drawn


def _ranked(
    adjusted: Tensor, tokens: Tensor, rows: Sequence[VerifyRow], starts: Sequence[int]
) -> tuple[tuple[tuple[int, ...], Ranked], ...]:
    """:attr:`Choice.ranked`; rows that want the same number of alternatives share the work."""
    by_top: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            by_top.setdefault(row.params.logprobs, []).append(i)
    found = []
    for top, members in by_top.items():
        where = [starts[i] + j for i in members for j in range(len(rows[i].drafts) + 1)]
        index = upload(where, torch.int64, adjusted.device)
        found.append((tuple(members), rank(adjusted[index], tokens[index], top)))
    return tuple(found)


def _result(tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...]) -> Verified:
    if tokens[-1] == NOT_FINITE:
        return Verified((), 0, (), "the model produced logits that are not finite numbers")
    return Verified(tuple(tokens), len(tokens) - 1, logprobs)
