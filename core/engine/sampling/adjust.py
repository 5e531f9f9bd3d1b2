"""What requests do to logits before temperature: bias, then penalties, then ``min_tokens``, which forbids
end tokens (stop strings: :mod:`engine.service.output_text`).

Penalties follow the common definitions. Presence and frequency look at the output only; repetition divides positive
and multiplies negative logits of every token in prompt or output (Keskar et al., "CTRL", 2019). A position inside a
drafted run sees the drafts before it, exactly as if they had been generated one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling.state import Feature, SamplingBatch, SamplingState


def adjust_(
    logits: Tensor, batch: SamplingBatch, state: SamplingState, tokens: Tensor, longest: int, on_triton: bool = False
) -> None:
    """Change ``logits`` (float32 ``[N, V]``) in place.

    ``tokens``: int64 ``[rows, positions]``, each row's text with its drafts, at least up to the positions of ``batch``;
    ``longest``: a bound of the text before any of these. ``on_triton``: penalties by a kernel that needs no bound.
    Biased and stop tokens outside the vocabulary are ignored. Nothing here waits for the device or depends on what is
    in tensors, except on a CPU: may be captured.
    """
    if Feature.BIASED in batch.features:
        ids = state.bias_ids.index_select(0, batch.rows)
        inside = ids < logits.shape[1]
        values = state.bias_values.index_select(0, batch.rows).masked_fill_(~inside, 0.0)
        logits.scatter_add_(1, ids.masked_fill_(~inside, 0), values)
    if Feature.PENALISED in batch.features:
        if on_triton:
            from engine.sampling.triton.penalties import penalise_on_device  # Triton is imported only where it runs

            penalise_on_device(logits, batch, tokens)
        else:
            _penalise(logits, batch, tokens, longest)
    if Feature.MIN_TOKENS in batch.features:
        ids = state.stop_ids.index_select(0, batch.rows)
        forbidden = (ids < logits.shape[1]) & (batch.output_index < batch.min_tokens)[:, None]
        values = torch.zeros_like(ids, dtype=logits.dtype).masked_fill_(forbidden, float("-inf"))
        logits.scatter_add_(1, ids.masked_fill_(ids >= logits.shape[1], 0), values)


def _penalise(logits: Tensor, batch: SamplingBatch, tokens: Tensor, longest: int) -> None:
    """Change only the logits of tokens that occurred: the work grows with the text, not with the vocabulary."""
    text = tokens[batch.rows, :longest]
    position = torch.arange(text.shape[1], device=text.device)
    known = position <= batch.positions[:, None]
    is_output = (known & (position >= batch.prompt_len[:, None])).to(logits.dtype)
    # After its text a row repeats its first token, not marked as output, which changes nothing.
    text = torch.where(known, text, text[:, :1])
    counts = torch.zeros_like(logits).scatter_add_(1, text, is_output)
    count, value = counts.gather(1, text), logits.gather(1, text)
    value = torch.where(value > 0, value / batch.repetition[:, None], value * batch.repetition[:, None])
    value -= batch.frequency[:, None] * count
    value -= batch.presence[:, None] * (count > 0)
    # A token that occurs twice is written twice with the same value, so the order of writes does not matter.
    logits.scatter_(1, text, value)
