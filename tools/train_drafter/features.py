"""What a drafter learns from: batches of answered prompts with the target's hidden states and its likeliest tokens.

A batch holds whole sequences, right-padded to ``T`` tokens. Its composition is fixed, so that what the target computes
can be kept on disk; a pass of training shuffles the batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools.train_drafter.answers import Answered
from tools.train_drafter.target import Target
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """``A``: most tokens that the target answered in a row, less one; where a row has fewer, ``real`` is False.

    Column ``a`` of a row with a prompt of ``P`` tokens is about position ``P - 1 + a``: the last one from which the
    answer's token ``a`` follows.
    """

    ids: Tensor
    """int64 ``[rows, T]``"""
    starts: Tensor
    """int64 ``[rows, A]``: positions ``P - 1 + a``, 0 where not real."""
    real: Tensor
    """bool ``[rows, A]``: the answer has a token at the position after it."""
    aux_layers: Tensor
    """``[rows, T, len(aux_layers) * hidden_size]``, as kept: float16, or what the target computes in."""
    choices: Tensor
    """int64 ``[rows, A, K]``: what the target finds most likely to follow position ``P - 1 + a``, the first first."""
    probabilities: Tensor
    """float32 ``[rows, A, K]``, at temperature 1; their sum falls short of 1 by what is not among them."""
    groups: tuple[str, ...]
    """By row."""


def composed(answers: Sequence[Answered], batch_tokens: int) -> list[list[Answered]]:
    """Batches of similar lengths with at most ``batch_tokens`` tokens each, padding included, or one row."""
    batches: list[list[Answered]] = []
    rows: list[Answered] = []
    for answered in sorted(answers, key=lambda each: len(each.tokens)):
        if rows and len(answered.tokens) * (len(rows) + 1) > batch_tokens:
            batches.append(rows)
            rows = []
        rows.append(answered)
    return [*batches, rows] if rows else batches


def shuffled(count: int, seed: int, number: int) -> list[int]:
    """The order in which pass ``number`` takes ``count`` batches."""
    return random.Random(f"{seed}/{number}").sample(range(count), count)


class Features:
    """Batches by number. ``folder``: where they are kept once computed, ``None``: nowhere, so each pass computes them
    again. A folder belongs to one target and its answers; each choice of layers has its own within it, and a drafter
    without any takes any.

    Raises ``ValueError`` for a folder that belongs to others.
    """

    def __init__(
        self,
        target: Target,
        answers: Sequence[Answered],
        aux_layers: Sequence[int],
        batch_tokens: int,
        choices: int,
        folder: Path | None = None,
    ) -> None:
        self._target = target
        self._batches = composed(answers, batch_tokens)
        self._aux_layers = tuple(aux_layers)
        self._choices = min(choices, target.facts.vocab_size)
        self._folder = folder
        if folder is not None:
            tokens = hashlib.sha256(repr([row.tokens for rows in self._batches for row in rows]).encode()).hexdigest()
            owner = {"model": target.facts.path, "dtype": target.plan.dtype, "tokens": tokens, "choices": self._choices}
            self._folder, self._aux_layers = _claimed(folder, owner, self._aux_layers)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        rows = self._batches[number]
        ids, starts, real = _positions(rows)
        tensors = self._kept(number, starts)
        device = self._target.device
        return Batch(
            ids=ids.to(device),
            starts=starts.to(device),
            real=real.to(device),
            aux_layers=tensors["aux_layers"].to(device),
            choices=tensors["choices"].long().to(device),
            probabilities=tensors["probabilities"].float().to(device),
            groups=tuple(row.group for row in rows),
        )

    def _kept(self, number: int, starts: Tensor) -> dict[str, Tensor]:
        if self._folder is None:
            return self._computed(number, starts)
        file = self._folder / f"batch-{number:06}.safetensors"
        if not file.exists():
            new = file.with_suffix(f".{os.getpid()}")  # several runs may share a folder
            save_file(self._computed(number, starts), new)
            os.replace(new, file)
        kept: dict[str, Tensor] = load_file(file)
        return kept

    def _computed(self, number: int, starts: Tensor) -> dict[str, Tensor]:
        """Ordinary tensors, which gradients may be computed with, unlike those of an inference mode."""
        seen = self._target.see([row.tokens for row in self._batches[number]], self._aux_layers)
        device = seen.residual.device
        rows = torch.arange(len(starts), device=device)[:, None]
        with torch.no_grad():
            wanted = seen.residual[rows, starts.to(device)].flatten(0, 1)
            ids, probabilities = self._target.likeliest(wanted, self._choices)
            shape = (*starts.shape, self._choices)
            kept = torch.float16 if seen.aux_layers.dtype == torch.float32 else seen.aux_layers.dtype
            return {
                "aux_layers": seen.aux_layers.to(kept).clone(),
                "choices": ids.view(shape).to(torch.int32).clone(),
                "probabilities": probabilities.view(shape).half().clone(),
            }


def _claimed(folder: Path, owner: dict[str, Any], aux_layers: tuple[int, ...]) -> tuple[Path, tuple[int, ...]]:
    """Write down or check whom a folder belongs to. Returns where what is computed goes, and which layers with it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "owner.json"
    if not file.exists():
        file.write_text(json.dumps(owner), encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    differing = [key for key, value in owner.items() if found.get(key) != value]
    if differing:
        raise ValueError(
            f"{folder} was computed with other {', '.join(differing)}; remove it or take another --features"
        )
    kept = [tuple(map(int, each.name.split("-")[1:])) for each in sorted(folder.glob("aux_layers-*"))]
    aux_layers = aux_layers or next(iter(kept), ())
    chosen = folder / "-".join(["aux_layers", *map(str, aux_layers)]) if aux_layers else folder / "no-aux_layers"
    chosen.mkdir(exist_ok=True)
    return chosen, aux_layers


def token_counts(answers: Sequence[Answered], vocab_size: int) -> Tensor:
    """How often each token is the target's own: int64 ``[vocab_size]``."""
    own = [token for answered in answers for token in answered.tokens[answered.prompt_len :]]
    return torch.bincount(torch.tensor(own), minlength=vocab_size)


def _positions(rows: Sequence[Answered]) -> tuple[Tensor, Tensor, Tensor]:
    """``ids``, ``starts`` and ``real`` of :class:`Batch`."""
    longest = max(len(row.tokens) for row in rows)
    columns = torch.arange(max(len(row.tokens) - row.prompt_len for row in rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row.tokens)] = torch.tensor(row.tokens)
    prompts = torch.tensor([row.prompt_len for row in rows])[:, None]
    lengths = torch.tensor([len(row.tokens) for row in rows])[:, None]
    starts = prompts - 1 + columns
    real = starts + 1 < lengths
    return ids, torch.where(real, starts, 0), real
