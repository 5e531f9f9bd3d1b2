"""Choosing tokens from adjusted logits: temperature, then top-k, top-p, min-p, then the Gumbel maximum.

Each filter keeps the tokens that are *at least as likely as* some border, so the three together are one threshold on
the scaled logits. Tokens that tie with the border are all kept: which tokens survive never depends on a sort's whims.

A token is ``argmax(scaled + g)`` with Gumbel noise ``g`` named by (seed, output position): a draw from the filtered
softmax that depends on this row's logits, seed and position and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execution.philox import GUMBEL_SPAN, SAMPLE, gumbel, gumbel_at
from engine.execution.positions import Position, streams
from engine.execution.transfer import upload

NOT_FINITE = -1
"""Stands in for the token of a row whose logits hold NaN or +inf, or nothing but -inf."""

_SHORT_LIST = 1024
"""On a CPU the border is looked for among this many most likely tokens before everything is sorted."""


def choose(logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """The target's token at every position: int64 ``[N]``, on the device, without waiting for it.

    ``logits``: float32 ``[N, V]``, adjusted. Greedy rows take the lowest id among equals. Broken rows get
    :data:`NOT_FINITE`.
    """
    # Unlike on a GPU, max is several times faster than argmax on a CPU; both return the first of equals.
    largest, tokens = logits.max(dim=-1)
    sampled = [i for i, p in enumerate(positions) if not p.is_greedy]
    if len(sampled) == len(positions):
        tokens = _draw(logits, largest, positions)
    elif sampled:
        rows = upload(sampled, torch.int64, logits.device)
        drawn = _draw(logits[rows], largest[rows], [positions[i] for i in sampled])
        tokens = tokens.index_copy(0, rows, drawn)
    return torch.where(largest.isfinite(), tokens, NOT_FINITE)


def most_likely(logits: Tensor) -> Tensor:
    """The greedy choice of :func:`choose`, for every row."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, NOT_FINITE)


def target_probs(logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """What sampled positions draw from: the filtered softmax, float32 ``[N, V]``."""
    scaled = _scale(logits, logits.amax(dim=-1), positions)
    border = _border(scaled, positions)
    return scaled.masked_fill_(scaled < border[:, None], float("-inf")).softmax(dim=-1)


def draw_from_weights(weights: Tensor, positions: Sequence[Position], purpose: int) -> Tensor:
    """One draw per row from unnormalised probabilities (float32 ``[N, V]``, some positive): int64 ``[N]``."""
    seeds, indices = streams(positions, weights.device)
    return _gumbel_max(weights.log(), weights > 0, seeds, indices, purpose)


def _draw(logits: Tensor, largest: Tensor, positions: Sequence[Position]) -> Tensor:
    scaled = _scale(logits, largest, positions)
    # Pruning what cannot win is exact, and spares noise for the long tail.
    border = _border(scaled, positions).clamp_(min=-GUMBEL_SPAN)
    seeds, indices = streams(positions, logits.device)
    return _gumbel_max(scaled, scaled >= border[:, None], seeds, indices, SAMPLE)


def _scale(logits: Tensor, largest: Tensor, positions: Sequence[Position]) -> Tensor:
    """``(logits - largest) / temperature``: at most 0, so no temperature overflows."""
    temperature = upload([p.params.temperature for p in positions], torch.float32, logits.device)
    return (logits - largest[:, None]).div_(temperature[:, None])


def _gumbel_max(scores: Tensor, allowed: Tensor, seeds: Tensor, indices: Tensor, purpose: int) -> Tensor:
    vocab = scores.shape[1]
    if scores.device.type == "cpu":
        count = int(allowed.count_nonzero())
        if 4 * count < scores.numel():  # a single entry costs a whole Philox block of four
            rows, ids = allowed.nonzero(as_tuple=True)
            noisy = torch.full_like(scores, float("-inf"))
            noise = gumbel_at(seeds[rows], indices[rows], purpose, ids)
            noisy[rows, ids] = scores[rows, ids] + noise
            return noisy.max(dim=-1).indices
    noisy = gumbel(seeds, indices, purpose, vocab).add_(scores)
    return noisy.masked_fill_(~allowed, float("-inf")).max(dim=-1).indices


def _border(scaled: Tensor, positions: Sequence[Position]) -> Tensor:
    """The lowest scaled logit that survives all filters, float32 ``[N]``; ``-inf`` keeps everything."""
    vocab = scaled.shape[1]
    border = upload(
        [math.log(p.params.min_p) if p.params.min_p > 0 else -math.inf for p in positions],
        torch.float32,
        scaled.device,
    )
    rows = [i for i, p in enumerate(positions) if 0 < p.params.top_k < vocab or p.params.top_p < 1.0]
    if not rows:
        return border
    index = upload(rows, torch.int64, scaled.device)
    chosen = [positions[i] for i in rows]
    subset = scaled if len(rows) == len(positions) else scaled[index]
    top_k = upload([_top_k(p, vocab) for p in chosen], torch.int64, scaled.device)
    top_p = upload([p.params.top_p for p in chosen], torch.float64, scaled.device)
    found = _ranked_border(subset, top_k, top_p, _list_length(chosen, scaled))
    return border.index_copy(0, index, torch.maximum(border[index], found))


def _top_k(position: Position, vocab: int) -> int:
    return position.params.top_k if 0 < position.params.top_k < vocab else 0


def _list_length(positions: Sequence[Position], scaled: Tensor) -> int:
    """How many of the most likely tokens to rank first. On a GPU all: asking whether fewer suffice would wait."""
    vocab = scaled.shape[1]
    if scaled.device.type != "cpu" or vocab <= 4 * _SHORT_LIST:
        return vocab
    if all(0 < p.params.top_k <= _SHORT_LIST // 2 for p in positions):
        return max(64, 2 * max(p.params.top_k for p in positions))
    return _SHORT_LIST


def _ranked_border(scaled: Tensor, top_k: Tensor, top_p: Tensor, length: int) -> Tensor:
    """Border of top-k, then top-p within what top-k left. float32 ``[N]``.

    Looks at the ``length`` most likely tokens; rows for which these do not settle it look at more, in the end at all.
    """
    vocab = scaled.shape[1]
    if length < vocab:
        ranked = scaled.topk(length, dim=-1).values
    else:
        ranked = scaled.sort(dim=-1, descending=True).values
    last_kept = ranked.gather(1, (top_k - 1).clamp_(0, length - 1)[:, None])
    border_k = torch.where(top_k[:, None] > 0, last_kept, float("-inf"))
    mass = ranked.exp().masked_fill_(ranked < border_k, 0.0).double()
    up_to = mass.cumsum(dim=-1)
    # The largest entry of a softmax is 1 / normaliser here, because the largest scaled logit is 0. (A sum would be
    # split differently for one row than for two.)
    everything = scaled.softmax(dim=-1).amax(dim=-1, keepdim=True).double().reciprocal()
    total = torch.where(top_k[:, None] > 0, up_to[:, -1:], everything)
    enough = (up_to - mass) >= top_p[:, None] * total
    enough |= ranked < border_k
    enough[:, 0] = False
    nucleus = ranked.masked_fill(enough, float("inf")).amin(dim=-1)
    border = torch.where((top_p < 1.0) | (top_k > 0), nucleus, float("-inf"))
    if length == vocab:
        return border
    beyond = ranked[:, -1]
    settled = (beyond < border) & ((top_k == 0) | (beyond < border_k.squeeze(1))) & (top_k <= length)
    open_rows = (~settled).nonzero().squeeze(1)
    if len(open_rows):
        longer = 16 * length if 32 * length < vocab else vocab
        border[open_rows] = _ranked_border(scaled[open_rows], top_k[open_rows], top_p[open_rows], longer)
    return border
