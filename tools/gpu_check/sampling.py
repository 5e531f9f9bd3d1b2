"""The sampling kernels choose the tokens that torch's operations choose, in a real vocabulary, for many seeds."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.execution.positions import Position
from engine.execution.sampling import choose
from engine.execution.triton_sampling.sampler import sample_on_device
from engine.execution.triton_sampling.tensors import SamplingTensors
from gpu_check.section import Context, Row

SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.95}, {"top_k": 50, "top_p": 0.9}, {"top_k": 1},
    {"min_p": 0.05}, {"temperature": 1.5, "top_k": 200, "min_p": 0.01}, {"top_p": 0.5}, {"temperature": 0.2},
)  # fmt: skip


def run(context: Context) -> None:
    vocab, rows, rounds = (700, 9, 1) if context.rehearse else (128256, 63, 8)
    params = [SamplingParams(**kwargs) for kwargs in itertools.islice(itertools.cycle(SETTINGS), rows)]
    same = total = 0
    wrong: list[str] = []
    for number in range(rounds):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(number)).mul(3.0).to(context.device)
        seeds = [number * 1000 + i * 77 for i in range(rows)]
        got, want = sample_on_device(logits, tensors(params, seeds, logits.device)), wanted(logits, params, seeds)
        total += rows
        same += int((got == want).sum())
        wrong += [str(params[i]) for i in (got != want).nonzero().flatten().tolist()]
    metric = f"sampled tokens as torch's, vocabulary {vocab}"
    context.emit(Row(metric, f"{same} of {total}", held=same == total, target="all", detail=wrong[:20]))


def tensors(params: list[SamplingParams], seeds: list[int], device: torch.device) -> SamplingTensors:
    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingTensors(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
        seeds=column(seeds, torch.int64),
        positions=column(list(range(len(params))), torch.int64),
    )


def wanted(logits: Tensor, params: list[SamplingParams], seeds: list[int]) -> Tensor:
    nothing = torch.zeros(0, dtype=torch.int64, device=logits.device)
    return choose(logits, [Position(p, seeds[i], i, 0, nothing) for i, p in enumerate(params)])
