"""Checkpoints loaded with the built-in plugins, on a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.assembly.device_facts import device_facts
from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelFacts
from engine.kernels.loading import Progress, load_model
from engine.kernels.model import LoweredModel
from engine.kernels.settings import Kernels
from engine.models.record import recorded
from engine.testing import paged_loop
from engine.testing.context import build_context
from engine_plugins.attention_kernel.cpu.kernel import CpuAttention
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.kv_format.native import NativeFormat
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.unquantized import Unquantized
from tests.families import LLAMA, model_facts

BLOCK_SIZE = paged_loop.BLOCK


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
        dtype,
        "cpu",
        on_progress,
        kernels=kernels,
    )
    return facts, model


class PagedLoop(paged_loop.PagedLoop):
    """Of a model with the built-in plugins."""

    def __init__(self, facts: ModelFacts, model: LoweredModel, dtype: str = "float32", num_blocks: int = 64) -> None:
        super().__init__(model, dtype, num_blocks, NativeFormat(SlotConfig(), build_context()))

    def logits(self, tokens: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Of every token of a fresh sequence, ``[len(tokens), vocab]``."""
        return super().logits([(self.add(), tokens)])[0]
