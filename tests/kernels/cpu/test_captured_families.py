"""Steps of families with experts, interleaved rotations and latent attention are programs: the same as op by op, bit
for bit, and what torch computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.kernels.model import LoweredModel
from engine.kernels.settings import MOST_TOKENS
from engine.startup.rank import load_plan
from engine.testing.architecture import tensors_of
from tests.kernels.cpu.test_captured_steps import TOKENS, compare
from tests.kernels.paged_loop import BLOCK_SIZE, PagedLoop
from tests.native import needs_compiler

pytestmark = needs_compiler

SHAPE = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24, "v_head_dim": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": SHAPE | MOE | {"model_type": "qwen3_moe", "num_experts": 8},
    "GptOss": SHAPE | {
        "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Glm4": SHAPE | {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "DeepseekV2": SHAPE | MOE | LATENT | {"model_type": "deepseek_v2"},
    "DeepseekV3": SHAPE | MOE | LATENT | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
}  # fmt: skip


def written(folder: Path, family: str) -> Path:
    """A random checkpoint."""
    (folder / "config.json").write_text(json.dumps(FAMILIES[family] | {"architectures": [f"{family}ForCausalLM"]}))
    graph = described(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in tensors_of(graph)}
    save_file(weights, folder / "model.safetensors")
    return folder


def described(folder: Path) -> Graph:
    plan = assemble([f"model.path={folder}", "device=cpu", "exporter=[]"])
    return bind(plan).graph


def lowered(folder: Path, dtype: str, *overrides: str) -> tuple[ModelFacts, LoweredModel]:
    fixed = ("device=cpu", "threads=1", "exporter=[]", f"kv_allocator.block_size={BLOCK_SIZE}")
    plan = assemble([f"model.path={folder}", *fixed, f"model.dtype={dtype}", *overrides])
    return plan.model, load_plan(plan, bind(plan))


IN_BFLOAT16 = ("GptOss", "DeepseekV3")
"""Routed and latent layers of the default run: every kind of layer is a program in float32."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in FAMILIES),
        *(pytest.param(f, "bfloat16", marks=() if f in IN_BFLOAT16 else pytest.mark.slow) for f in FAMILIES),
    ],
)
def test_steps_of_a_family_are_programs(family: str, dtype: str, tmp_path: Path) -> None:
    facts, model = lowered(written(tmp_path, family), dtype, "execution=compile")
    assert model.lowering[-1] == f"steps: up to {MOST_TOKENS} tokens are one call for all layers; else op by op"
    steps = compare(facts, model, dtype)
    assert steps.programs.notes() == () and len(steps.programs.written) == MOST_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_a_family_give_the_logits_of_torch(family: str, tmp_path: Path) -> None:
    folder = written(tmp_path, family)
    facts, native = lowered(folder, "float32", "execution=compile")
    _, plain = lowered(folder, "float32", "execution=eager", "attention_kernel=torch")
    one, other = PagedLoop(facts, native), PagedLoop(facts, plain)
    for tokens in (TOKENS, TOKENS[:5]):
        got, want = one.logits(tokens), other.logits(tokens)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
