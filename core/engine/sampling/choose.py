"""Choosing tokens from adjusted logits: temperature, then top-k, top-p, min-p, then the Gumbel maximum.

Each filter keeps the tokens that are *at least as likely as* some border, so the three together are one threshold on
the scaled logits. Tokens that tie with the border are all kept: which tokens survive never depends on a sort's whims.

A token is ``argmax(scaled + g)`` with Gumbel noise ``g`` named by (seed, output position): a draw from the filtered
softmax that depends on this row's logits, seed and position and on nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.torch.reference import NOT_FINITE
from engine.sampling.philox import GUMBEL_SPAN, SAMPLE, gumbel, gumbel_at
from engine.sampling.state import Feature, SamplingBatch

_SHORT_LIST = 1024
"""On a CPU the border is looked for among this many most likely tokens before everything is sorted."""


def choose(logits: Tensor, batch: SamplingBatch, ids: Tensor | None = None) -> Tensor:
    """The token of every position: int64 ``[N]``, on the device, without waiting for it.

    ``logits``: float32 ``[N, V]``, adjusted. Greedy rows take the lowest id among equals. Broken rows get
    :data:`NOT_FINITE`. ``ids``: int64 ``[V]``, the token each column stands for where that is not its index: the one
    whose noise it gets, and what is returned for it.
    """
    # Unlike on a GPU, max is several times faster than argmax on a CPU; both return the first of equals.
    largest, tokens = logits.max(dim=-1)
    if Feature.SAMPLED in batch.features:
        tokens = _sampled(logits, largest, tokens, batch, ids)
    if ids is not None:
        tokens = ids[tokens]
    return torch.where(largest.isfinite(), tokens, NOT_FINITE)


def _may_be_asked(tensor: Tensor) -> bool:
    """Whether it costs nothing to ask what is in a tensor, and to do no more than that needs: on a CPU."""
    return tensor.device.type == "cpu"


def _sampled(logits: Tensor, largest: Tensor, tokens: Tensor, batch: SamplingBatch, ids: Tensor | None) -> Tensor:
    """``tokens`` with those of sampled rows drawn."""
    greedy = batch.temperature == 0.0
    if _may_be_asked(logits):
        rows = (~greedy).nonzero().squeeze(1)
        if len(rows) == len(tokens):
            return _draw(logits, largest, batch, ids)
        return tokens.index_copy(0, rows, _draw(logits[rows], largest[rows], batch.take(rows), ids))
    return torch.where(greedy, tokens, _draw(logits, largest, batch, ids))


def _draw(logits: Tensor, largest: Tensor, batch: SamplingBatch, ids: Tensor | None) -> Tensor:
    # At most 0, so no temperature overflows.
    temperature = torch.where(batch.temperature == 0.0, 1.0, batch.temperature)
    scaled = (logits - largest[:, None]).div_(temperature[:, None])
    # Pruning what cannot win is exact, and spares noise for the long tail.
    border = find_border(scaled, batch).clamp_(min=-GUMBEL_SPAN)
    return _gumbel_max(scaled, scaled >= border[:, None], batch.seeds, batch.output_index, ids)


def _gumbel_max(scores: Tensor, allowed: Tensor, seeds: Tensor, indices: Tensor, ids: Tensor | None) -> Tensor:
    vocab = scores.shape[1]
    if _may_be_asked(scores):
        count = int(allowed.count_nonzero())
        if ids is not None or 4 * count < scores.numel():  # a single entry costs a whole Philox block of four
            rows, columns = allowed.nonzero(as_tuple=True)
            noisy = torch.full_like(scores, float("-inf"))
            noise = gumbel_at(seeds[rows], indices[rows], SAMPLE, columns if ids is None else ids[columns])
            noisy[rows, columns] = scores[rows, columns] + noise
            return noisy.max(dim=-1).indices
    if ids is None:
        noise = gumbel(seeds, indices, SAMPLE, vocab)
    else:
        count = len(seeds)
        flat = gumbel_at(seeds.repeat_interleave(vocab), indices.repeat_interleave(vocab), SAMPLE, ids.repeat(count))
        noise = flat.view(count, vocab)
    return noise.add_(scores).masked_fill_(~allowed, float("-inf")).max(dim=-1).indices


def find_border(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """The lowest scaled logit that survives all filters, float32 ``[N]``; ``-inf`` keeps everything.

    ``scaled``: float32 ``[N, V]``, the largest of each row 0.
    """
    vocab = scaled.shape[1]
    border = batch.min_p.log()  # -inf for 0
    if Feature.FILTERED not in batch.features:
        return border
    top_k = torch.where(batch.top_k < vocab, batch.top_k, 0)
    if not _may_be_asked(scaled):
        return torch.maximum(border, _ranked_border(scaled, top_k, batch.top_p, vocab))
    rows = ((top_k > 0) | (batch.top_p < 1.0)).nonzero().squeeze(1)
    if not len(rows):
        return border
    subset = scaled if len(rows) == len(scaled) else scaled[rows]
    top_k = top_k[rows]
    found = _ranked_border(subset, top_k, batch.top_p[rows], _list_length(top_k, vocab))
    return border.index_copy(0, rows, torch.maximum(border[rows], found))


def _list_length(top_k: Tensor, vocab: int) -> int:
    """How many of the most likely tokens to rank first, on a CPU."""
    if vocab <= 4 * _SHORT_LIST:
        return vocab
    least, most = int(top_k.min()), int(top_k.max())
    return max(64, 2 * most) if least > 0 and most <= _SHORT_LIST // 2 else _SHORT_LIST


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
    enough[:, 0].fill_(False)
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
