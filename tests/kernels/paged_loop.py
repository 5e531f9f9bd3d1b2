"""A minimal paged loop for tests: one model, a cache with scattered blocks, greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.assembly.device_facts import device_facts
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.config import ParallelismConfig, SlotConfig
from engine.contracts.model import ModelFacts
from engine.kernels.loading import Progress, load_model
from engine.kernels.model import ForwardBatch, LoweredModel
from engine.kernels.settings import Kernels
from engine.kv.cache import KVCache
from engine.kv.groups import one_group
from engine.models.record import recorded
from engine.testing.context import build_context
from engine_plugins.attention_kernel.cpu.kernel import CpuAttention
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.kv_format.native import NativeFormat
from engine_plugins.parallelism.single import SingleDevice
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.unquantized import Unquantized
from tests.families import LLAMA, model_facts

BLOCK_SIZE = 8


def load(
    path: Path | str,
    dtype: str = "float32",
    quantizer: Any = None,
    kernels: Kernels = "torch",
    on_progress: Progress | None = None,
    kv_format: Any = NativeFormat,
) -> tuple[ModelFacts, LoweredModel]:
    """Facts and lowered model of a checkpoint directory."""
    facts = model_facts(str(path))
    execution = "compile" if kernels == "native" else "eager"
    context = build_context(block_size=BLOCK_SIZE, device=device_facts("cpu"), dtype=dtype, execution=execution)
    context = replace(context, model=facts)
    model = load_model(
        facts,
        recorded(LLAMA, facts),
        quantizer or Unquantized(UnquantizedConfig(), context),
        (CpuAttention if kernels == "native" else TorchAttention)(SlotConfig(), context),
        kv_format(SlotConfig(), context),
        SingleDevice(ParallelismConfig(), context),
        dtype,
        "cpu",
        on_progress,
        kernels=kernels,
    )
    return facts, model


class PagedLoop:
    """Sequences on one cache. Blocks are handed out in a scattered order."""

    def __init__(self, facts: ModelFacts, model: LoweredModel, dtype: str = "float32", num_blocks: int = 64) -> None:
        self.model = model
        caches, kv_format = one_group(model.graph.caches), NativeFormat(SlotConfig(), build_context())
        self.kv = KVCache(caches, kv_format, [num_blocks], BLOCK_SIZE, dtype, "cpu")
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self._free: list[int] = order.tolist()
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []

    def add(self) -> int:
        self.tables.append([])
        self.lengths.append(0)
        return len(self.tables) - 1

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run ``(sequence, tokens)`` rows; the residual of every token, and the aux_layers."""
        tokens, positions, slots, owners = [], [], [], []
        for sequence, new in rows:
            table, start = self.tables[sequence], self.lengths[sequence]
            while len(table) * BLOCK_SIZE < start + len(new):
                table.append(self._free.pop())
            for position in range(start, start + len(new)):
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            tokens += new
            owners += [sequence] * len(new)
            self.lengths[sequence] += len(new)
        q_lens = tuple(len(new) for _, new in rows)
        kv_lens = tuple(self.lengths[sequence] for sequence, _ in rows)
        width = max(len(self.tables[sequence]) for sequence, _ in rows)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _ in rows]
        starts = torch.tensor([0, *q_lens]).cumsum(0).int()
        attention = AttentionBatch(
            q_lens, kv_lens, torch.tensor(tables, dtype=torch.int32), starts, torch.tensor(kv_lens).int(), BLOCK_SIZE
        )
        batch = ForwardBatch(
            torch.tensor(tokens), torch.tensor(positions), (torch.tensor(slots),), (attention,), torch.tensor(owners)
        )
        return self.model.forward(batch, self.kv, aux_layers)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Of every token of a fresh sequence, ``[len(tokens), vocab]``."""
        return self.model.head(self.step([(self.add(), tokens)])[0])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``prompt``, one step each."""
        sequence, new, out = self.add(), list(prompt), []
        for _ in range(count):
            hidden, _ = self.step([(sequence, new)])
            new = [int(self.model.head(hidden[-1:]).argmax())]
            out += new
        return out
