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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.request import SamplingParams, TokenLogprobs
from engine.execution.adjust import adjust
from engine.execution.logprobs import token_logprobs
from engine.execution.philox import ACCEPT, RESIDUAL, uniform
from engine.execution.positions import Position, column, streams
from engine.execution.sampling import NOT_FINITE, choose, draw_from_weights, target_probs


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


def sample_tokens(logits: Tensor, rows: Sequence[VerifyRow]) -> Tensor:
    """One token per row, int64 ``[R]``, left on the device: the host does not wait.

    ``logits``: float32 ``[R, V]``. For rows without drafts and logprobs; the tokens are those of :func:`verify`. A row
    whose logits are broken gets ``NOT_FINITE`` (-1): clamp before using it as an input, and fail the request once
    the value reaches the host.
    """
    assert len(logits) == len(rows)
    assert not any(row.drafts for row in rows)
    positions = _positions(rows)
    return choose(adjust(logits, positions), positions)


def verify(logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
    """Judge the drafts of every row and sample the token after the last accepted one.

    ``logits``: float32 ``[sum(1 + len(row.drafts)), V]``, rows one after another; entry ``j`` of a row predicts its
    ``j``-th draft (the last one what follows all drafts).
    """
    positions = _positions(rows)
    assert len(logits) == len(positions)
    adjusted = adjust(logits, positions)
    starts = _starts(rows)
    outputs: list[list[int]] = [[] for _ in rows]
    shared = [i for i, row in enumerate(rows) if not row.uses_rejection]
    _verify_shared(adjusted, positions, rows, starts, shared, outputs)
    rejecting = [i for i, row in enumerate(rows) if row.uses_rejection]
    if rejecting:
        _verify_by_rejection(adjusted, positions, rows, starts, rejecting, outputs)
    logprobs = _logprobs(adjusted, rows, starts, outputs)
    return [_result(tokens, row_logprobs) for tokens, row_logprobs in zip(outputs, logprobs)]


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


def _verify_shared(
    adjusted: Tensor,
    positions: Sequence[Position],
    rows: Sequence[VerifyRow],
    starts: Sequence[int],
    which: Sequence[int],
    outputs: list[list[int]],
) -> None:
    """Greedy and shared-noise rows: the target's tokens first, then a comparison on the host."""
    if not which:
        return
    wanted = [starts[i] + j for i in which for j in range(len(rows[i].drafts) + 1)]
    if len(wanted) == len(positions):
        tokens = choose(adjusted, positions).tolist()
    else:
        index = column(wanted, torch.int64, adjusted.device)
        tokens = choose(adjusted[index], [positions[w] for w in wanted]).tolist()
    at = 0
    for i in which:
        drafts = rows[i].drafts
        target = tokens[at : at + len(drafts) + 1]
        at += len(target)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == target[accepted]:
            accepted += 1
        outputs[i] = target[: accepted + 1]


def _verify_by_rejection(
    adjusted: Tensor,
    positions: Sequence[Position],
    rows: Sequence[VerifyRow],
    starts: Sequence[int],
    which: Sequence[int],
    outputs: list[list[int]],
) -> None:
    device = adjusted.device
    wanted = [starts[i] + j for i in which for j in range(len(rows[i].drafts) + 1)]
    chosen = [positions[w] for w in wanted]
    logits = adjusted[column(wanted, torch.int64, device)]
    finite = logits.amax(dim=-1).isfinite()
    p = target_probs(logits, chosen)
    q = _proposals([rows[i] for i in which], p)
    # The position after all drafts has no proposal: q is 0 there, nothing stands, and the draw is from p itself.
    drafts = column([d for i in which for d in (*rows[i].drafts, 0)], torch.int64, device)[:, None]
    coin = uniform(*streams(chosen, device), ACCEPT, 1)
    stands = (coin * q.gather(1, drafts) < p.gather(1, drafts)).squeeze(1)
    verdicts: list[tuple[bool, bool]] = list(zip(stands.tolist(), finite.tolist()))
    ends: list[int] = []
    at = 0
    for i in which:
        width, end = len(rows[i].drafts), at
        while end < at + width and all(verdicts[end]):
            end += 1
        outputs[i] = list(rows[i].drafts[: end - at])
        ends.append(end)
        at += width + 1
    replacements = _replace(p, q, chosen, ends)
    for i, end, token in zip(which, ends, replacements):
        outputs[i].append(token if verdicts[end][1] else NOT_FINITE)


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
    index = column(ends, torch.int64, p.device)
    target = p[index]
    residual = (target - q[index]).clamp_(min=0.0)
    # p and q equal up to rounding leave nothing over; then p is the residual's limit.
    empty = residual.amax(dim=-1, keepdim=True) <= 0
    weights = torch.where(empty, target, residual)
    drawn: list[int] = draw_from_weights(weights, [positions[e] for e in ends], RESIDUAL).tolist()
    return drawn


def _logprobs(
    adjusted: Tensor, rows: Sequence[VerifyRow], starts: Sequence[int], outputs: Sequence[Sequence[int]]
) -> list[tuple[TokenLogprobs, ...]]:
    """Logprobs of the rows that asked; rows that want the same number of alternatives share the work."""
    found: list[tuple[TokenLogprobs, ...]] = [()] * len(rows)
    by_top: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None and outputs[i][-1] != NOT_FINITE:
            by_top.setdefault(row.params.logprobs, []).append(i)
    for top, members in by_top.items():
        where = [starts[i] + j for i in members for j in range(len(outputs[i]))]
        tokens = [token for i in members for token in outputs[i]]
        index = column(where, torch.int64, adjusted.device)
        values = token_logprobs(adjusted[index], column(tokens, torch.int64, adjusted.device), top)
        at = 0
        for i in members:
            found[i] = tuple(values[at : at + len(outputs[i])])
            at += len(outputs[i])
    return found


def _result(tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...]) -> Verified:
    if tokens[-1] == NOT_FINITE:
        return Verified((), 0, (), "the model produced logits that are not finite numbers")
    return Verified(tuple(tokens), len(tokens) - 1, logprobs)
