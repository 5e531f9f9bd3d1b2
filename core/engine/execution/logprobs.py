"""Log-probabilities of tokens, as the API reports them.

They are of the softmax of the adjusted logits: after bias, penalties and the minimum length, before temperature and
truncation. So a request's sampling settings do not change what the model is reported to believe.
"""

from __future__ import annotations

from torch import Tensor

from engine.contracts.request import TokenLogprobs

_CHUNK_ELEMENTS = 1 << 24
"""Elements of logits that are normalised at once: bounds the memory of long prompts (64 MiB in float32)."""


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprobs]:
    """Logprob of ``tokens`` (int64 ``[N]``) and the ``top`` most likely ones under ``logits`` (float32 ``[N, V]``).

    Equally likely tokens are listed by id.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
    best = [()] * len(own) if top == 0 else _best(logprobs, top)
    return [TokenLogprobs(t, lp, b) for t, lp, b in zip(tokens.tolist(), own, best)]


def prompt_logprobs(logits: Tensor, targets: Tensor, top: int) -> list[TokenLogprobs]:
    """Logprobs of prompt tokens: ``logits[i]`` (float32 ``[n, V]``) predicts ``targets[i]`` (int64 ``[n]``)."""
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), rows):
        found += token_logprobs(logits[start : start + rows].float(), targets[start : start + rows], top)
    return found


def _best(logprobs: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    host_values, host_ids = values.tolist(), ids.tolist()
    return [
        tuple(sorted(zip(row_ids, row_values), key=lambda pair: (-pair[1], pair[0])))
        for row_ids, row_values in zip(host_ids, host_values)
    ]
