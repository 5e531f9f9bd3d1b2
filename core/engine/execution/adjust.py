"""What requests do to logits before temperature: bias, then penalties, then the minimum length.

Penalties follow the common definitions. Presence and frequency look at the output only; repetition divides positive
and multiplies negative logits of every token in prompt or output (Keskar et al., "CTRL", 2019). A position inside a
drafted run sees the drafts before it, exactly as if they had been generated one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.execution.positions import Position
from engine.execution.transfer import upload


def adjust(logits: Tensor, positions: Sequence[Position], *, on_triton: bool = False) -> Tensor:
    """The adjusted copy of ``logits`` (float32 ``[N, V]``); ``logits`` itself when nobody asks for anything.

    Token ids outside the vocabulary are ignored. ``on_triton``: with a kernel, for positions that have a
    :attr:`~engine.execution.positions.Position.row`.
    """
    biased = [i for i, p in enumerate(positions) if p.params.logit_bias]
    penalised = [i for i, p in enumerate(positions) if _has_penalty(p.params)]
    too_short = [i for i, p in enumerate(positions) if p.index < p.params.min_tokens and p.stop_ids]
    if not (biased or penalised or too_short):
        return logits
    logits = logits.clone()
    if biased:
        _add_bias(logits, positions, biased)
    if penalised and on_triton:
        from engine.execution.device_sampling import penalise_rows  # Triton is imported only where it runs

        penalise_rows(logits, positions)
    elif penalised:
        _penalise(logits, positions, penalised)
    if too_short:
        _forbid_stops(logits, positions, too_short)
    return logits


def adjusts(params: SamplingParams) -> bool:
    """Whether a request's logits are changed at every position."""
    return bool(params.logit_bias) or _has_penalty(params)


def _has_penalty(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def _add_bias(logits: Tensor, positions: Sequence[Position], rows: Sequence[int]) -> None:
    vocab = logits.shape[1]
    entries = [
        (row * vocab + token, bias)
        for row in rows
        for token, bias in positions[row].params.logit_bias.items()
        if 0 <= token < vocab
    ]
    where = upload([entry[0] for entry in entries], torch.int64, logits.device)
    by = upload([entry[1] for entry in entries], logits.dtype, logits.device)
    logits.view(-1).index_add_(0, where, by)


def _forbid_stops(logits: Tensor, positions: Sequence[Position], rows: Sequence[int]) -> None:
    vocab = logits.shape[1]
    where = [row * vocab + t for row in rows for t in positions[row].stop_ids if 0 <= t < vocab]
    logits.view(-1).index_fill_(0, upload(where, torch.int64, logits.device), float("-inf"))


def _penalise(logits: Tensor, positions: Sequence[Position], rows: Sequence[int]) -> None:
    """Change only the logits of tokens that occurred: the work grows with the text, not with the vocabulary."""
    device = logits.device
    chosen = [positions[row] for row in rows]
    tokens, is_output = _occurrences(chosen, device)
    index = upload(rows, torch.int64, device)
    counts = torch.zeros(len(rows), logits.shape[1], device=device).scatter_add_(1, tokens, is_output)
    count = counts.gather(1, tokens)
    value = logits[index[:, None], tokens]

    def per_row(name: str) -> Tensor:
        return upload([getattr(p.params, name) for p in chosen], logits.dtype, device)[:, None]

    repetition = per_row("repetition_penalty")
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= per_row("frequency_penalty") * count
    value -= per_row("presence_penalty") * (count > 0)
    # A token that occurs twice is written twice with the same value, so the order of writes does not matter.
    logits[index[:, None], tokens] = value


def _occurrences(positions: Sequence[Position], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens before each position, int64 ``[P, L]``, and 1.0 where one is output, float32 ``[P, L]``.

    Short rows are filled with their own first token, marked as not output, which changes nothing.
    """
    lengths = [len(p.history) + len(p.drafts) for p in positions]
    longest = max(lengths)
    tokens = torch.empty(len(positions), longest, dtype=torch.int64, device=device)
    for row, (position, length) in enumerate(zip(positions, lengths)):
        known = len(position.history)
        tokens[row, :known] = position.history
        if position.drafts:
            tokens[row, known:length] = upload(position.drafts, torch.int64, device)
        if length < longest:
            tokens[row, length:] = tokens[row, :1]
    place = torch.arange(longest, device=device)[None, :]
    starts = upload([p.prompt_len for p in positions], torch.int64, device)[:, None]
    ends = upload(lengths, torch.int64, device)[:, None]
    return tokens, ((place >= starts) & (place < ends)).float()
