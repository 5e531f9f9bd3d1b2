"""Architectures with a bug each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelFacts
from engine.contracts.ops import (
    Attention,
    DownResidual,
    LayerOp,
    LinearSpec,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    OutResidual,
)
from engine.testing.architecture import ArchitectureConformance
from engine.testing.context import build_context
from engine_plugins.architecture.llama import LlamaArchitecture
from tests.testing.mutants.mutant import OnPlugin, mutant

AGAIN = "test_a_model_is_described_the_same_whenever_it_is_asked"
TENSORS = "test_a_description_touches_no_tensor_and_no_file"
LAYERS = "test_layers_are_those_of_the_model"
HEADS = "test_attention_has_the_heads_and_windows_of_the_model"
WIDTHS = "test_linear_layers_have_the_widths_of_the_model"
EDGES = "test_embedding_and_head_are_as_the_model_says"
NAMES = "test_every_tensor_has_a_name_of_its_own"
REFERENCE = "test_tensors_are_those_of_the_reference"
LOGITS = "test_logits_are_those_of_the_reference"
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-1, "tie_word_embeddings": False,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


class Suite(OnPlugin, ArchitectureConformance):
    def make(self) -> Any:
        return self.plugin(SlotConfig(), build_context())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        return {
            "qwen2": SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | window,
            "tied": SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
        }

    def reference(self, model: ModelFacts) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and most mutants need none

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.raw), attn_implementation="eager")


class Edited(LlamaArchitecture):
    """Describes what :meth:`op` and :meth:`whole` make of a correct description."""

    def describe(self, model: ModelFacts) -> ModelOps:
        ops = super().describe(model)
        layers = tuple(tuple(self.op(op, index) for op in layer) for index, layer in enumerate(ops.layers))
        return self.whole(replace(ops, layers=layers))

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return op

    def whole(self, ops: ModelOps) -> ModelOps:
        return ops


def renamed(spec: LinearSpec, rename: Callable[[str], str]) -> LinearSpec:
    return replace(spec, parts=tuple(replace(part, name=rename(part.name)) for part in spec.parts))


@mutant(Suite, LAYERS)
class OneLayerShort(Edited):
    """Counts layers from 1."""

    def whole(self, ops: ModelOps) -> ModelOps:
        return replace(ops, layers=ops.layers[1:])


@mutant(Suite, LAYERS)
class NoDown(Edited):
    """Forgets the down projection."""

    def whole(self, ops: ModelOps) -> ModelOps:
        return replace(ops, layers=tuple(layer[:-1] for layer in ops.layers))


@mutant(Suite, WIDTHS, REFERENCE)
class KeysAsWideAsQueries(Edited):
    """Gives keys and values as many heads as queries."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        if not isinstance(op, NormQKVRopeWrite):
            return op
        wide = op.qkv.parts[0].out_features
        parts = tuple(replace(part, out_features=wide) for part in op.qkv.parts)
        return replace(op, qkv=replace(op.qkv, parts=parts))


@mutant(Suite, HEADS)
class AllHeadsKeep(Edited):
    """Forgets that query heads share key-value heads."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return replace(op, num_kv_heads=op.num_heads) if isinstance(op, (Attention, NormQKVRopeWrite)) else op


@mutant(Suite, HEADS, LOGITS)
class OneWindowForAll(Edited):
    """Gives every layer the window of the last."""

    def whole(self, ops: ModelOps) -> ModelOps:
        window = next(op.window for op in ops.layers[-1] if isinstance(op, Attention))
        return replace(ops, layers=tuple(tuple(self.narrowed(op, window) for op in layer) for layer in ops.layers))

    @staticmethod
    def narrowed(op: LayerOp, window: int | None) -> LayerOp:
        return replace(op, window=window) if isinstance(op, Attention) else op


@mutant(Suite, WIDTHS)
class CutsTheWrongAxis(Edited):
    """Cuts the output projection along its outputs for tensor parallelism."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return replace(op, out=replace(op.out, shard="out")) if isinstance(op, OutResidual) else op


@mutant(Suite, WIDTHS)
class GateOfAnyKind(Edited):
    """Does not say that a layer is one of gates and ups."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return replace(op, gate_up=replace(op.gate_up, kind="body")) if isinstance(op, NormGateUpAct) else op


@mutant(Suite, EDGES)
class NeverTied(Edited):
    """Expects a head of its own where the embedding serves as one."""

    def whole(self, ops: ModelOps) -> ModelOps:
        return replace(ops, head=replace(ops.head, tied=False))


@mutant(Suite, EDGES)
class PaddedVocabulary(Edited):
    """Rounds the vocabulary up to a multiple of 128."""

    def whole(self, ops: ModelOps) -> ModelOps:
        return replace(ops, embed=replace(ops.embed, vocab_size=-(-ops.embed.vocab_size // 128) * 128))


@mutant(Suite, NAMES, REFERENCE)
class SameNames(Edited):
    """Writes every layer's tensors with the number of the first."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        if not isinstance(op, DownResidual):
            return op
        return replace(op, down=renamed(op.down, lambda name: name.replace(f"layers.{index}", "layers.0")))


@mutant(Suite, NAMES)
class NamelessNorm(Edited):
    """Leaves the final norm without a name."""

    def whole(self, ops: ModelOps) -> ModelOps:
        return replace(ops, head=replace(ops.head, norm=replace(ops.head.norm, name="")))


@mutant(Suite, REFERENCE)
class ForgetsBiases(Edited):
    """Forgets the biases of queries, keys and values."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        if not isinstance(op, NormQKVRopeWrite):
            return op
        return replace(op, qkv=replace(op.qkv, parts=tuple(replace(part, bias=False) for part in op.qkv.parts)))


@mutant(Suite, REFERENCE)
class OtherPrefix(Edited):
    """Names tensors as another library does."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        if not isinstance(op, OutResidual):
            return op
        return replace(op, out=renamed(op.out, lambda name: name.replace("self_attn", "attention")))


@mutant(Suite, LOGITS)
class UpBeforeGate(Edited):
    """Names the up projection where the gate belongs."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        if not isinstance(op, NormGateUpAct):
            return op
        return replace(op, gate_up=replace(op.gate_up, parts=op.gate_up.parts[::-1]))


@mutant(Suite, LOGITS)
class KeysForValues(Edited):
    """Names values where keys belong."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        if not isinstance(op, NormQKVRopeWrite):
            return op
        q, k, v = op.qkv.parts
        return replace(op, qkv=replace(op.qkv, parts=(q, v, k)))


@mutant(Suite, LOGITS)
class AlwaysSilu(Edited):
    """Uses SiLU whatever the configuration says."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return replace(op, act="silu") if isinstance(op, NormGateUpAct) else op


@mutant(Suite, LOGITS)
class UnscaledScores(Edited):
    """Does not scale scores by the root of the head size."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return replace(op, scale=1.0) if isinstance(op, Attention) else op


@mutant(Suite, LOGITS)
class NoRotation(Edited):
    """Forgets to rotate queries and keys."""

    def op(self, op: LayerOp, index: int) -> LayerOp:
        return replace(op, rope=None) if isinstance(op, NormQKVRopeWrite) and index else op


@mutant(Suite, LOGITS)
class EpsilonOfItsOwn(Edited):
    """Norms with an epsilon of its own instead of the configuration's."""

    def whole(self, ops: ModelOps) -> ModelOps:
        return replace(ops, head=replace(ops.head, norm=replace(ops.head.norm, eps=1e-6)))


@mutant(Suite, AGAIN)
class RemembersTheFirst(LlamaArchitecture):
    """Keeps its first description and gives it for every model, a drafter's included."""

    _kept: ModelOps | None = None

    def describe(self, model: ModelFacts) -> ModelOps:
        self._kept = self._kept or super().describe(model)
        layers = self._kept.layers if len(self._kept.layers) == model.num_layers else super().describe(model).layers
        return replace(super().describe(model), layers=layers)


@mutant(Suite, AGAIN)
class NumbersDescriptions(LlamaArchitecture):
    """Counts its descriptions in the name of the head."""

    _count = 0

    def describe(self, model: ModelFacts) -> ModelOps:
        self._count += 1
        ops = super().describe(model)
        return replace(ops, head=replace(ops.head, head=renamed(ops.head.head, lambda name: f"{name}{self._count}")))


@mutant(Suite, AGAIN)
class FillsInDefaults(LlamaArchitecture):
    """Writes defaults into the configuration that it is shown."""

    def describe(self, model: ModelFacts) -> ModelOps:
        model.raw.setdefault("attention_bias", False)  # type: ignore[attr-defined]
        return super().describe(model)


@mutant(Suite, TENSORS)
class MakesATensor(LlamaArchitecture):
    """Computes the scale of attention with torch."""

    def describe(self, model: ModelFacts) -> ModelOps:
        assert float(torch.tensor(float(model.head_dim)).rsqrt()) > 0.0
        return super().describe(model)


@mutant(Suite, TENSORS)
class ReadsTheFolder(LlamaArchitecture):
    """Reads the model's folder, which a model that is only planned does not have."""

    def describe(self, model: ModelFacts) -> ModelOps:
        assert any(Path(model.path).iterdir())
        return super().describe(model)
