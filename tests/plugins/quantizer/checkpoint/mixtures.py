"""Tiny random mixtures of experts, and how quantized ones are compared with the dense weights they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.plugins.quantizer.checkpoint.writers import Case, write_case
from torch import Tensor

from engine.assembly.device_facts import device_facts
from engine.assembly.model_config import model_config
from engine.contracts.architecture import Architecture
from engine.contracts.config import SlotConfig
from engine.contracts.quantizer import Quantizer
from engine.kernels.settings import Kernels
from engine.models.record import facts, recorded
from engine.testing.context import build_context
from engine.testing.paged_loop import PagedLoop, loaded
from engine_plugins.architecture.deepseek import DeepseekArchitecture
from engine_plugins.architecture.experts import MixtralArchitecture, QwenMoeArchitecture
from engine_plugins.architecture.gpt_oss import GptOssArchitecture
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
DEEPSEEK: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "intermediate_size": SIZE, "moe_intermediate_size": SIZE, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "kv_lora_rank": 40, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GPT_OSS: dict[str, Any] = COMMON | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": EXPERTS,
    "intermediate_size": SIZE, "sliding_window": 8,
}  # fmt: skip
CONFIGS = {"qwen2_moe": QWEN2, "mixtral": MIXTRAL, "deepseek_v3": DEEPSEEK, "gpt_oss": GPT_OSS}
TOKENS = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(3)).tolist()

CHUNKS = (20, 23)
"""Where steps end."""


def weights(family: str, layers: int = LAYERS) -> dict[str, Tensor]:
    """Of one of :data:`CONFIGS`."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    tensors = {name: matrix(96, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = 1.0 + matrix(HIDDEN)
    for i in range(layers):
        name = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = 1.0 + matrix(HIDDEN)
        for part, shape in (*_attention(family), *_feed_forward(family, i)):
            tensors[f"{name}.{part}.weight"] = matrix(*shape)
        if family == "deepseek_v3":
            for norm, size in (("q_a_layernorm", 24), ("kv_a_layernorm", 40)):
                tensors[f"{name}.self_attn.{norm}.weight"] = 1.0 + matrix(size)
            if i:
                tensors[f"{name}.mlp.gate.e_score_correction_bias"] = matrix(EXPERTS)
        if family == "gpt_oss":
            tensors |= {f"{name}.{part}": matrix(*shape) for part, shape in OF_GPT_OSS.items()}
    return tensors


OF_GPT_OSS = {
    **{f"self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))},
    "self_attn.sinks": (4,), "mlp.router.weight": (EXPERTS, HIDDEN), "mlp.router.bias": (EXPERTS,),
    "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * SIZE), "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * SIZE),
    "mlp.experts.down_proj": (EXPERTS, SIZE, HIDDEN), "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
}  # fmt: skip
"""Experts together, inputs before outputs, gates and ups in turns."""


def _attention(family: str) -> Iterator[tuple[str, tuple[int, int]]]:
    if family == "deepseek_v3":
        shapes = {
            "q_a_proj": (24, HIDDEN), "q_b_proj": (80, 24), "kv_a_proj_with_mqa": (48, HIDDEN), "kv_b_proj": (88, 40),
            "o_proj": (HIDDEN, 40),
        }  # fmt: skip
    else:
        shapes = {f"{part}_proj": (rows, HIDDEN) for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    yield from ((f"self_attn.{part}", shape) for part, shape in shapes.items())


def _feed_forward(family: str, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    if family == "gpt_oss":
        return
    if family == "deepseek_v3" and layer == 0:
        yield from _gated("mlp", SIZE)
        return
    name, parts = ("block_sparse_moe", ("w1", "w3", "w2")) if family == "mixtral" else ("mlp", PARTS)
    yield f"{name}.gate", (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        yield from _gated(f"{name}.experts.{expert}", SIZE, parts)
    if family == "qwen2_moe":
        yield "mlp.shared_expert_gate", (1, HIDDEN)
        yield from _gated("mlp.shared_expert", SHARED)
    if family == "deepseek_v3":
        yield from _gated("mlp.shared_experts", SIZE)


PARTS = ("gate_proj", "up_proj", "down_proj")


def _gated(name: str, size: int, parts: Sequence[str] = PARTS) -> Iterator[tuple[str, tuple[int, int]]]:
    for part, shape in zip(parts, ((size, HIDDEN), (size, HIDDEN), (HIDDEN, size)), strict=True):
        yield f"{name}.{part}", shape


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of each layer in one tensor for each of theirs, gates before ups, as transformers holds them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in (name for name in tensors if ".experts.0.gate_proj." in name or ".experts.0.down_proj." in name):
        layer, suffix = name.split(".experts.0.")[0], name.rpartition(".")[2]
        ending = suffix.replace("weight", "", 1)
        kinds = ("gate", "up") if "gate" in name else ("down",)
        experts = [[tensors[f"{layer}.experts.{e}.{kind}_proj.{suffix}"] for kind in kinds] for e in range(EXPERTS)]
        stacked = torch.stack([torch.cat([one.view(torch.uint8) for one in parts]) for parts in experts])
        whole = stacked.view(experts[0][0].dtype)
        found[f"{layer}.experts.{'gate_up' if 'gate' in name else 'down'}_proj{ending}"] = whole
    return found


NOT_CONVERTED = {
    "compressed-tensors": ("ignore", ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]),
    "fp8": ("modules_to_not_convert", ["mlp.gate", "mlp.shared_expert_gate"]),
    "modelopt": ("exclude_modules", ["lm_head", "*.mlp.gate", "*shared_expert_gate"]),
    "awq": ("modules_to_not_convert", None),
    "gptq": ("modules_to_not_convert", None),
}
"""How each format says that gates of experts are left alone; the last two need not."""


def write_mixture(folder: Path, case: Case, family: str = "qwen2_moe", layers: int = LAYERS) -> tuple[Path, Path]:
    key, names = NOT_CONVERTED[case.quantization["quant_method"]]
    quantization = {**case.quantization}
    inner = quantization["quantization"] = {**quantization["quantization"]} if key == "exclude_modules" else {}
    (inner if inner else quantization)[key] = names
    case = replace(case, quantization=quantization, extra={}, left=())
    config = CONFIGS[family] | {"num_hidden_layers": layers}
    return write_case(folder, case, weights(family, layers), config)


def reader(folder: Path, activations: str = "bf16", **context: Any) -> Quantizer:
    """``quantizer=checkpoint`` for this folder on this machine."""
    made = build_context(device=device_facts("cpu"), dtype="float32", **context)
    model = facts(architecture_of(folder), model_config(str(folder)))
    return FromCheckpoint(CheckpointConfig(activations=activations), replace(made, model=model))


def architecture_of(folder: Path) -> Architecture:
    plugin: Any = {
        "MixtralForCausalLM": MixtralArchitecture, "Qwen2MoeForCausalLM": QwenMoeArchitecture,
        "DeepseekV3ForCausalLM": DeepseekArchitecture,
        "GptOssForCausalLM": GptOssArchitecture,
    }[model_config(str(folder)).architecture]  # fmt: skip
    made: Architecture = plugin(SlotConfig())
    return made


def loop(folder: Path, kernels: Kernels = "torch", quantizer: Quantizer | None = None) -> PagedLoop:
    architecture, config = architecture_of(folder), model_config(str(folder))
    execution = "eager" if kernels == "torch" else "compile"
    quantizer = quantizer or reader(folder, execution=execution)
    return PagedLoop(loaded(facts(architecture, config), recorded(architecture, config), kernels, quantizer))


def logits(folder: Path, kernels: Kernels = "torch") -> Tensor:
    """``[tokens, vocab]`` in float32: of many tokens at once, of a few, and of one."""
    computed = loop(folder, kernels)
    sequence, (many, few) = computed.add(), CHUNKS
    rows = TOKENS[:many], TOKENS[many:few], TOKENS[few:]
    return torch.cat([computed.logits([(sequence, tokens)])[0] for tokens in rows])


def difference(quantized: Path, dense: Path, kernels: Kernels = "torch") -> float:
    """Largest difference of logits as a share of the largest logit."""
    want = logits(dense)
    return float((logits(quantized, kernels) - want).abs().max() / want.abs().max())
