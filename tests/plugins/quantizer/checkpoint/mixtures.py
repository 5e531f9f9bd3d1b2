"""Tiny random mixtures of experts, and how quantized ones are compared with the dense weights they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.assembly.device_facts import device_facts
from engine.assembly.model_config import model_config
from engine.contracts.architecture import Architecture
from engine.contracts.config import SlotConfig
from engine.contracts.quantizer import Quantizer
from engine.kernels.settings import Kernels
from engine.models.record import facts, recorded
from engine.testing.context import build_context
from engine.testing.paged_loop import PagedLoop
from engine_plugins.architecture.experts import MixtralArchitecture, QwenMoeArchitecture
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.quantizer import FromCheckpoint

HIDDEN, LAYERS, EXPERTS, SIZE, SHARED = 64, 2, 4, 96, 64
COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "num_experts_per_tok": 2, "torch_dtype": "float32",
}  # fmt: skip
QWEN2: dict[str, Any] = COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "qkv_bias": False, "num_experts": EXPERTS,
    "moe_intermediate_size": SIZE, "shared_expert_intermediate_size": SHARED, "intermediate_size": SIZE,
    "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL: dict[str, Any] = COMMON | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
    "intermediate_size": SIZE,
}  # fmt: skip
TOKENS = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def weights(family: str) -> dict[str, Tensor]:
    """``mixtral`` or ``qwen2_moe``."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    tensors = {name: matrix(96, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = 1.0 + matrix(HIDDEN)
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = 1.0 + matrix(HIDDEN)
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows, HIDDEN)
        for part, shape in _feed_forward(family):
            tensors[f"{name}.{part}.weight"] = matrix(*shape)
    return tensors


def _feed_forward(family: str) -> Iterator[tuple[str, tuple[int, int]]]:
    up, down = (SIZE, HIDDEN), (HIDDEN, SIZE)
    if family == "mixtral":
        yield "block_sparse_moe.gate", (EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            yield from ((f"block_sparse_moe.experts.{e}.{part}", down if part == "w2" else up) for part in ("w1", "w2", "w3"))
        return
    yield "mlp.gate", (EXPERTS, HIDDEN)
    yield "mlp.shared_expert_gate", (1, HIDDEN)
    for e in range(EXPERTS):
        yield from ((f"mlp.experts.{e}.{part}_proj", up) for part in ("gate", "up"))
        yield f"mlp.experts.{e}.down_proj", down
    yield from ((f"mlp.shared_expert.{part}_proj", (SHARED, HIDDEN)) for part in ("gate", "up"))
    yield "mlp.shared_expert.down_proj", (HIDDEN, SHARED)


def reader(folder: Path, activations: str = "bf16", **context: Any) -> Quantizer:
    """``quantizer=checkpoint`` for this folder on this machine."""
    made = build_context(device=device_facts("cpu"), dtype="float32", **context)
    model = facts(architecture_of(folder), model_config(str(folder)))
    return FromCheckpoint(CheckpointConfig(activations=activations), replace(made, model=model))


def architecture_of(folder: Path) -> Architecture:
    plugin: Any = {
        "MixtralForCausalLM": MixtralArchitecture, "Qwen2MoeForCausalLM": QwenMoeArchitecture,
    }[model_config(str(folder)).architecture]  # fmt: skip
    made: Architecture = plugin(SlotConfig())
    return made


def loop(folder: Path, kernels: Kernels = "torch", quantizer: Quantizer | None = None) -> PagedLoop:
    architecture, config = architecture_of(folder), model_config(str(folder))
    execution = "compile" if kernels == "native" else "eager"
    quantizer = quantizer or reader(folder, execution=execution)
    return PagedLoop(facts(architecture, config), recorded(architecture, config), kernels, quantizer)


def logits(folder: Path, kernels: Kernels = "torch") -> Tensor:
    """``[tokens, vocab]`` in float32."""
    computed = loop(folder, kernels)
    return computed.logits([(computed.add(), TOKENS)])[0]


def difference(quantized: Path, dense: Path, kernels: Kernels = "torch") -> float:
    """Largest difference of logits as a share of the largest logit."""
    want = logits(dense)
    return float((logits(quantized, kernels) - want).abs().max() / want.abs().max())
