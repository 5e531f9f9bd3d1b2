"""A checkpoint's logits against those of the dense weights it stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.families import model_facts
from tests.kernels.paged_loop import PagedLoop, load
from torch import Tensor

from engine.assembly.device_facts import device_facts
from engine.contracts.kv_format import KVFormat
from engine.contracts.quantizer import Quantizer
from engine.kernels.model import LoweredModel
from engine.testing.context import build_context
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.quantizer import FromCheckpoint

LARGEST = 2e-5
"""Accepted difference as a share of the largest logit: what the order of float32 sums makes."""
TOKENS = torch.randint(0, 120, (48,), generator=torch.Generator().manual_seed(3)).tolist()


def reader(folder: Path, activations: str = "bf16", dtype: str = "float32") -> Quantizer:
    """``quantizer=checkpoint`` for this folder on this machine."""
    context = replace(build_context(device=device_facts("cpu"), dtype=dtype), model=model_facts(str(folder)))
    return FromCheckpoint(CheckpointConfig(activations=activations), context)


def loaded(folder: Path, activations: str = "bf16", kv_format: type[KVFormat] = FP8Format) -> LoweredModel:
    return load(folder, quantizer=reader(folder, activations), kv_format=kv_format)[1]


def logits(folder: Path, activations: str = "bf16") -> Tensor:
    """``[tokens, vocab]`` in float32."""
    facts, model = load(folder, quantizer=reader(folder, activations))
    return PagedLoop(facts, model).logits(TOKENS)


def difference(quantized: Path, dense: Path) -> float:
    """Largest difference of logits as a share of the largest logit."""
    want = logits(dense)
    return float((logits(quantized) - want).abs().max() / want.abs().max())
