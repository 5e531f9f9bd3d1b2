"""A decode step of one sequence in the shapes of public mixtures of experts, against reading what it reads.

Weights are random and drawn on the device; a step is captured as one CUDA graph, from the embedding to the most likely
token, after a thousand tokens. What one token does not choose is not read, so the limit is the measured read bandwidth
over the bytes of everything but the embedding and idle experts. Every replay chooses the same experts; in 48 layers
they are far more than any cache holds. A model that does not fit into free memory has fewer layers, and its rows say
so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import Quantizer, StoredTensor, Weight, WeightFormat
from engine.testing.attention_cases import PlainFormat
from engine.testing.random_model import RandomModel, random_model
from gpu_check import floors
from gpu_check.formats import Format
from gpu_check.section import Context, Row, time_row
from gpu_check.timing import device_ms, wall_s

TOKENS = 1024
ROOM = 0.8
"""Of the free memory that weights may take: caches, buffers and what packing needs for a moment come on top."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A shape, and what it is stored in beside bfloat16."""

    config: Mapping[str, Any]
    four_bits: Format
    architecture: str
    """``module:Class``, below ``engine_plugins.architecture``."""
    only_experts: bool = False
    """In 4 bits are experts alone, as gpt-oss is published; all else is bfloat16."""

    def name(self, form: Format | None) -> str:
        if form is None:
            return "bf16"
        return f"{form.name} experts" if self.only_experts and form == self.four_bits else form.name


def config(family: str, model_type: str, **sizes: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": model_type, "hidden_act": "silu",
        "max_position_embeddings": 32768, "tie_word_embeddings": False, **sizes,
    }  # fmt: skip


SUBJECTS = {
    "Qwen3-30B-A3B": Subject(
        config(
            "Qwen3Moe", "qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        ),
        Format("int4", group_size=128), "experts:QwenMoeArchitecture",
    ),
    "gpt-oss-20b": Subject(
        config(
            "GptOss", "gpt_oss", hidden_size=2880, num_hidden_layers=24, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
            sliding_window=128, vocab_size=201088,
        ),
        Format("int4", group_size=32), "gpt_oss:GptOssArchitecture", only_experts=True,
    ),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "vocab_size": 128,
    "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip
"""For a dry run."""


class RandomCodes:
    """A quantizer whose weights are random codes: no weight is drawn only to be rounded. The head is int8. ``beside``:
    packs what is no expert."""

    lossless = False

    def __init__(self, form: Format, beside: Quantizer | None) -> None:
        self._form, self._beside = form, beside

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return (StoredTensor("weight"), StoredTensor("bias", optional=True))

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        form = self._form_of(spec)
        return None if form is None else form.of_weights(spec.in_features)

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Weight:
        form = self._form_of(spec)
        if form is None:
            assert self._beside is not None
            return self._beside.pack(spec, parts, dtype, device)
        return form.weight(spec.out_features, spec.in_features, device)

    def _form_of(self, spec: LinearSpec) -> Format | None:
        """``None``: it is packed by ``beside``."""
        if self._beside is not None and not all(".experts." in part.name for part in spec.parts):
            return None
        return Format("int8") if spec.kind == "head" else self._form


def run(context: Context) -> None:
    for name, subject in SUBJECTS.items():
        # An interpreted step takes a second.
        for form in (None, subject.four_bits) if context.dry_run else (None, Format("fp8"), subject.four_bits):
            title = f"{name} shape, {subject.name(form)}"
            try:
                measure(context, title, subject, form)
            except Exception as problem:  # one format that cannot be must not hide the others
                context.emit(Row(title, held=False, detail=f"{type(problem).__name__}: {problem}"[:300]))
            gc.collect()
            if not context.dry_run:
                torch.cuda.empty_cache()


def measure(context: Context, title: str, subject: Subject, form: Format | None) -> None:
    sizes = {**subject.config, **TINY} if context.dry_run else dict(subject.config)
    layers = int(sizes["num_hidden_layers"])
    if not context.dry_run:
        free = torch.cuda.mem_get_info()[0]
        sizes["num_hidden_layers"] = layers = layers_that_fit(sizes, form, ROOM * free)
    whole = subject.config["num_hidden_layers"]
    of = "" if layers == whole or context.dry_run else f", {layers} of {whole} layers"
    metric = f"{title}{of}: decode, batch 1"
    if context.has(metric):
        return
    made = build(context, sizes, subject, form)
    ms = wall_s(made.step, "cpu") * 1e3 if context.dry_run else device_ms(captured(made), "cuda")
    bars = context.bars(floors.Work(made.weight_bytes + made.kv_bytes))
    detail = {"active_gb": made.weight_bytes / 1e9, "kv_mb": made.kv_bytes / 1e6, "layers": layers, "of": whole}
    context.emit(time_row(metric, ms, bars, detail=detail))


def build(context: Context, sizes: Mapping[str, Any], subject: Subject, form: Format | None) -> RandomModel:
    from importlib import import_module

    from engine_plugins.attention_kernel.triton.kernel import TritonAttention
    from engine_plugins.quantizer.config import UnquantizedConfig
    from engine_plugins.quantizer.unquantized import Unquantized

    module, kind = subject.architecture.split(":")
    architecture = getattr(import_module(f"engine_plugins.architecture.{module}"), kind)(SlotConfig())

    def quantizer(built: Any) -> Quantizer:
        plain = Unquantized(UnquantizedConfig(), built)
        if form is None:
            return plain
        return RandomCodes(form, plain if subject.only_experts and form == subject.four_bits else None)

    return random_model(
        architecture, sizes, quantizer, lambda built: TritonAttention(SlotConfig(), built), PlainFormat(),
        "float32" if context.dry_run else "bfloat16", context.device, tokens=24 if context.dry_run else TOKENS,
    )  # fmt: skip


def layers_that_fit(sizes: Mapping[str, Any], form: Format | None, room: float) -> int:
    """All, or as many as ``room`` bytes hold beside embedding and head."""
    hidden = sizes["hidden_size"]
    inner = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    count = sizes.get("num_experts", sizes.get("num_local_experts", 0))
    heads = 2 * (sizes["num_attention_heads"] + sizes["num_key_value_heads"]) * sizes["head_dim"]
    per_weight = 2.0 if form is None else {"int4": 0.5}.get(form.kind, 1.0) + 4.0 / (form.group_size or hidden)
    layer = hidden * (heads + 3 * inner * count) * per_weight
    return max(1, min(int(sizes["num_hidden_layers"]), int((room - 4 * hidden * sizes["vocab_size"]) / layer)))


def captured(made: RandomModel) -> Callable[[], object]:
    """A step as a graph; kernels are compiled before."""
    with torch.inference_mode():
        made.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made.step()
    return graph.replay
