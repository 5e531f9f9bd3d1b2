"""The sampling kernels choose the tokens that torch's operations choose, in a real vocabulary, for many seeds."""

from __future__ import annotations

import itertools
from functools import reduce
from operator import or_
from typing import Any

import torch

from engine.contracts.request import SamplingParams
from engine.sampling.choose import choose
from engine.sampling.state import Feature, SamplingBatch, SamplingState, features_of
from engine.sampling.triton.sampler import sample_on_device
from gpu_check.section import Context, Row

SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.95}, {"top_k": 50, "top_p": 0.9}, {"top_k": 1},
    {"min_p": 0.05}, {"temperature": 1.5, "top_k": 200, "min_p": 0.01}, {"top_p": 0.5}, {"temperature": 0.2},
)  # fmt: skip


def run(context: Context) -> None:
    vocab, columns, rows, rounds = (700, 300, 9, 1) if context.dry_run else (128256, 32000, 63, 8)
    compare(context, f"sampled tokens as torch's, vocabulary {vocab}", vocab, None, rows, rounds)
    of_columns = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:columns].to(context.device)
    compare(
        context, f"sampled tokens as torch's, {columns} tokens of the vocabulary", columns, of_columns, rows, rounds
    )


def compare(context: Context, metric: str, columns: int, ids: torch.Tensor | None, rows: int, rounds: int) -> None:
    """``ids``: the token each column stands for."""
    if context.has(metric):
        return
    params = [SamplingParams(**kwargs) for kwargs in itertools.islice(itertools.cycle(SETTINGS), rows)]
    same = total = 0
    wrong: list[str] = []
    for number in range(rounds):
        logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number)).mul(3.0)
        logits, batch = logits.to(context.device), batch_of(params, number * 1000, context.device)
        got, want = sample_on_device(logits, batch, ids), choose(logits, batch, ids)
        total += rows
        same += int((got == want).sum())
        wrong += [str(params[i]) for i in (got != want).nonzero().flatten().tolist()]
    context.emit(Row(metric, f"{same} of {total}", held=same == total, target="all", detail=wrong[:20]))


def batch_of(params: list[SamplingParams], first_seed: int, device: str) -> SamplingBatch:
    """Request ``i`` at its output position ``i``."""
    state = SamplingState(len(params), device)
    for row, request in enumerate(params):
        state.write(row, request, first_seed + row * 77, 1, ())
    every = torch.arange(len(params), device=device)
    return state.at(every, every, reduce(or_, map(features_of, params), Feature.NONE))
