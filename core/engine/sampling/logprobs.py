"""Log-probabilities of tokens, as the API reports them.

They are of the softmax of the adjusted logits: after bias, penalties and the minimum length, before temperature and
truncation. So a request's sampling settings do not change what the model is reported to believe.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.request import TokenLogprobs

_CHUNK_ELEMENTS = 1 << 24
"""Elements of logits that are normalised at once: bounds the memory of long prompts (64 MiB in float32)."""

Ranked = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens int64 ``[N]``, their logprobs float32 ``[N]``, the best logprobs ``[N, top]`` and their ids."""


def rank(logits: Tensor, tokens: Tensor, top: int) -> Ranked:
    """Logprob of ``tokens`` (int64 ``[N]``) and the ``top`` most likely ones under ``logits`` (float32 ``[N, V]``), on
    the device. A token below 0 stands for a row without one and gets another's logprob."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1)
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return tokens, own, values, ids


def rank_prompt(logits: Tensor, targets: Tensor, top: int) -> Ranked:
    """:func:`rank` of prompt tokens: ``logits[i]`` (float32 ``[n, V]``) predicts ``targets[i]`` (int64 ``[n]``)."""
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    parts = [rank(logits[i : i + rows].float(), targets[i : i + rows], top) for i in range(0, len(targets), rows)]
    return join(parts)


def join(parts: Sequence[Ranked]) -> Ranked:
    """Several, one after another."""
    if len(parts) == 1:
        return parts[0]
    tokens, own, values, ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return tokens, own, values, ids


def listed(tokens: Tensor, own: Tensor, values: Tensor, ids: Tensor) -> list[TokenLogprobs]:
    """As the API wants them, from host memory. Equally likely tokens are listed by id."""
    return [
        TokenLogprobs(token, logprob, tuple(sorted(zip(best_ids, best), key=lambda pair: (-pair[1], pair[0]))))
        for token, logprob, best, best_ids in zip(tokens.tolist(), own.tolist(), values.tolist(), ids.tolist())
    ]
