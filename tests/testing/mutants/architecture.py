"""Architectures with a bug each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import LinearPart
from engine.testing.architecture import ArchitectureConformance
from engine_plugins.architecture.llama import LlamaArchitecture
from tests.testing.mutants.mutant import OnPlugin, mutant

AGAIN = "test_a_model_is_described_the_same_whenever_it_is_asked"
TENSORS = "test_a_description_touches_no_tensor_and_no_file"
ACCEPTED = "test_the_core_accepts_its_graphs"
NAMES = "test_every_tensor_has_a_name_of_its_own"
CUTS = "test_cuts_for_tensor_parallelism_fit_together"
REFERENCE = "test_tensors_are_those_of_the_reference"
LOGITS = "test_logits_are_those_of_the_reference"
GREEDY = "test_greedy_tokens_are_those_of_the_reference"
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-1, "tie_word_embeddings": False,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


class Suite(OnPlugin, ArchitectureConformance):
    def make(self) -> Any:
        return self.plugin(SlotConfig())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        return {
            "qwen2": SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | window,
            "tied": SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
        }

    def reference(self, model: ModelConfig) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and most mutants need none

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.raw), attn_implementation="eager")


def changed(model: ModelConfig, **values: Any) -> ModelConfig:
    """With other values in ``config.json``."""
    return replace(model, raw={**model.raw, **values})


class Edited(LlamaArchitecture):
    """Methods of a mutant that are named as the builder's are called in their place, with the builder first."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        between: Any = Between(self, b)
        super().describe(model, between)


class Between:
    """A builder, but for what a mutant does itself."""

    def __init__(self, mutant: Edited, b: Builder) -> None:
        self._mutant = mutant
        self._builder = b

    def __getattr__(self, name: str) -> Any:
        mine = getattr(self._mutant, name, None)
        return getattr(self._builder, name) if mine is None else partial(mine, self._builder)


# What the core refuses -----------------------------------------------------------------------------------------------


@mutant(Suite, ACCEPTED)
class NoPositions(Edited):
    """Does not say how long a sequence may be."""

    def positions(self, b: Builder, count: int) -> None:
        pass


@mutant(Suite, ACCEPTED)
class SmallTable(Edited):
    """Embeds fewer tokens than it has logits for."""

    def embed(self, b: Builder, name: str, vocab_size: int, size: int) -> Value:
        return b.embed(name, vocab_size - 1, size)


@mutant(Suite, ACCEPTED)
class ResidualOfTheEmbedding(Edited):
    """Says that the embedding enters every layer as its residual."""

    def embed(self, b: Builder, *args: Any) -> Value:
        self._embedded = b.embed(*args)
        return self._embedded

    def layer(self, b: Builder, residual: Value) -> Any:
        return b.layer(self._embedded)


@mutant(Suite, ACCEPTED)
class SubtractsTheEmbedding(Edited):
    """Has a residual from the embedding to the head."""

    def embed(self, b: Builder, *args: Any) -> Value:
        self._embedded = b.embed(*args)
        return self._embedded

    def lm_head(self, b: Builder, x: Value, *args: Any, **options: Any) -> Value:
        return b.lm_head(b.add(x, b.scale(self._embedded, -1.0)), *args, **options)


# Names, sizes and cuts -----------------------------------------------------------------------------------------------


@mutant(Suite, REFERENCE)
class OneLayerShort(LlamaArchitecture):
    """Counts layers from 1."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        super().describe(changed(model, num_hidden_layers=model.raw["num_hidden_layers"] - 1), b)


@mutant(Suite, REFERENCE)
class AllHeadsKeep(LlamaArchitecture):
    """Forgets that query heads share key-value heads."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        super().describe(changed(model, num_key_value_heads=model.raw["num_attention_heads"]), b)


@mutant(Suite, REFERENCE)
class PaddedVocabulary(LlamaArchitecture):
    """Rounds the vocabulary up to a multiple of 128."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        super().describe(changed(model, vocab_size=-(-model.raw["vocab_size"] // 128) * 128), b)


@mutant(Suite, CUTS)
class CutsTheWrongAxis(Edited):
    """Cuts projections back to the residual along their outputs for tensor parallelism."""

    def linear(self, b: Builder, x: Value, *parts: LinearPart, shard: Any) -> Any:
        return b.linear(x, *parts, shard="out")


@mutant(Suite, CUTS)
class CutsNothing(Edited):
    """Does not say how anything is cut for tensor parallelism."""

    def linear(self, b: Builder, x: Value, *parts: LinearPart, shard: Any) -> Any:
        return b.linear(x, *parts)


@mutant(Suite, NAMES, REFERENCE)
class SameNames(Edited):
    """Writes every layer's down projection with the number of the first."""

    def linear(self, b: Builder, x: Value, *parts: LinearPart, shard: Any) -> Any:
        if parts[0].name.endswith("down_proj"):
            parts = (replace(parts[0], name="model.layers.0.mlp.down_proj"),)
        return b.linear(x, *parts, shard=shard)


@mutant(Suite, NAMES)
class NamelessNorm(Edited):
    """Leaves the final norm without a name."""

    def rms_norm(self, b: Builder, x: Value, name: str, *args: Any, **options: Any) -> Value:
        return b.rms_norm(x, "" if name == "model.norm" else name, *args, **options)


@mutant(Suite, REFERENCE)
class NeverTied(Edited):
    """Expects a head of its own where the embedding serves as one."""

    def lm_head(self, b: Builder, x: Value, name: str, vocab_size: int, *, tied: bool) -> Value:
        return b.lm_head(x, name, vocab_size)


@mutant(Suite, REFERENCE)
class ForgetsBiases(Edited):
    """Forgets the biases of queries, keys and values."""

    def linear(self, b: Builder, x: Value, *parts: LinearPart, shard: Any) -> Any:
        return b.linear(x, *(replace(part, bias=False) for part in parts), shard=shard)


@mutant(Suite, REFERENCE)
class OtherPrefix(Edited):
    """Names tensors as another library does."""

    def linear(self, b: Builder, x: Value, *parts: LinearPart, shard: Any) -> Any:
        named = (replace(part, name=part.name.replace("self_attn", "attention")) for part in parts)
        return b.linear(x, *named, shard=shard)


@mutant(Suite, REFERENCE)
class NarrowMLP(LlamaArchitecture):
    """Takes the hidden size for that of the gates."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        super().describe(changed(model, intermediate_size=model.raw["hidden_size"]), b)


# What is computed ----------------------------------------------------------------------------------------------------


@mutant(Suite, LOGITS, GREEDY)
class HalfHeads(LlamaArchitecture):
    """Has twice the heads of half the size, and as many features in all."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        heads = {key: 2 * model.raw[key] for key in ("num_attention_heads", "num_key_value_heads")}
        super().describe(changed(model, **heads), b)


@mutant(Suite, LOGITS, GREEDY)
class UpBeforeGate(Edited):
    """Names the up projection where the gate belongs."""

    def gated(self, b: Builder, gate: Value, up: Value, act: Any) -> Value:
        return b.gated(up, gate, act)


@mutant(Suite, LOGITS, GREEDY)
class KeysForValues(Edited):
    """Takes values for keys and keys for values."""

    def linear(self, b: Builder, x: Value, *parts: LinearPart, shard: Any) -> Any:
        if len(parts) == 3:
            parts = (parts[0], parts[2], parts[1])
        return b.linear(x, *parts, shard=shard)


@mutant(Suite, LOGITS)
class AlwaysSilu(Edited):
    """Uses SiLU whatever the configuration says."""

    def gated(self, b: Builder, gate: Value, up: Value, act: Any) -> Value:
        return b.gated(gate, up, "silu")


@mutant(Suite, LOGITS)
class OtherGelu(Edited):
    """Uses the GELU with the error function where its approximation is meant."""

    def gated(self, b: Builder, gate: Value, up: Value, act: Any) -> Value:
        return b.gated(gate, up, "gelu")


@mutant(Suite, LOGITS)
class UnscaledScores(Edited):
    """Does not scale scores by the root of the head size."""

    def attention(self, b: Builder, *args: Any, **options: Any) -> Value:
        return b.attention(*args, **{**options, "scale": 1.0})


@mutant(Suite, LOGITS)
class CappedScores(Edited):
    """Bounds scores as another family does."""

    def attention(self, b: Builder, *args: Any, **options: Any) -> Value:
        return b.attention(*args, **{**options, "soft_cap": 1.0})


@mutant(Suite, LOGITS)
class OneWindowForAll(LlamaArchitecture):
    """Gives every layer the window of the last."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        super().describe(changed(model, max_window_layers=0), b)


@mutant(Suite, LOGITS)
class WindowOffByOne(Edited):
    """Counts a window without the token itself."""

    def attention(self, b: Builder, *args: Any, window: int | None, **options: Any) -> Value:
        return b.attention(*args, window=None if window is None else window + 1, **options)


@mutant(Suite, LOGITS, GREEDY)
class NoRotation(Edited):
    """Forgets to rotate queries and keys."""

    def rope(self, b: Builder, q: Value, k: Value, *args: Any) -> tuple[Value, Value]:
        return q, k


@mutant(Suite, LOGITS)
class RotatesKeysTwice(Edited):
    """Rotates keys before and after they are rotated with the queries."""

    def rope(self, b: Builder, q: Value, k: Value, *args: Any) -> tuple[Value, Value]:
        return b.rope(q, b.rope(q, k, *args)[1], *args)


@mutant(Suite, LOGITS)
class EpsilonOfItsOwn(Edited):
    """Norms with an epsilon of its own instead of the configuration's."""

    def rms_norm(self, b: Builder, x: Value, name: str, eps: float, **options: Any) -> Value:
        return b.rms_norm(x, name, 1e-6 if name == "model.norm" else eps, **options)


@mutant(Suite, LOGITS, GREEDY)
class WeightsLessOne(Edited):
    """Adds 1 to the weights of norms, as for families that store them so."""

    def rms_norm(self, b: Builder, *args: Any, **options: Any) -> Value:
        return b.rms_norm(*args, **{**options, "offset": 1.0})


@mutant(Suite, LOGITS)
class CentredNorms(Edited):
    """Takes LayerNorm for RMSNorm."""

    def rms_norm(self, b: Builder, *args: Any, **options: Any) -> Value:
        return b.layer_norm(*args, **options)


@mutant(Suite, LOGITS)
class ScaledEmbedding(Edited):
    """Multiplies the embedding by the root of its size, as another family does."""

    def embed(self, b: Builder, name: str, vocab_size: int, size: int) -> Value:
        return b.scale(b.embed(name, vocab_size, size), size**0.5)


@mutant(Suite, LOGITS, GREEDY)
class ForgetsTheResidual(Edited):
    """Goes on with what the MLP makes alone."""

    def add(self, b: Builder, x: Value, y: Value) -> Value:
        self._adds = not getattr(self, "_adds", False)
        return b.add(x, y) if self._adds else y


# Descriptions --------------------------------------------------------------------------------------------------------


@mutant(Suite, AGAIN)
class RemembersTheFirst(LlamaArchitecture):
    """Asks its first model whether the head is tied, a drafter's included."""

    _tied: bool | None = None

    def describe(self, model: ModelConfig, b: Builder) -> None:
        self._tied = model.raw["tie_word_embeddings"] if self._tied is None else self._tied
        super().describe(changed(model, tie_word_embeddings=self._tied), b)


@mutant(Suite, AGAIN)
class NumbersDescriptions(Edited):
    """Counts its descriptions in the name of the head."""

    _count = 0

    def lm_head(self, b: Builder, x: Value, name: str, *args: Any, **options: Any) -> Value:
        self._count += 1
        return b.lm_head(x, f"{name}{self._count}", *args, **options)


@mutant(Suite, AGAIN)
class FillsInDefaults(LlamaArchitecture):
    """Writes defaults into the configuration that it is shown."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        model.raw.setdefault("attention_bias", False)  # type: ignore[attr-defined]
        super().describe(model, b)


@mutant(Suite, TENSORS)
class MakesATensor(LlamaArchitecture):
    """Computes the scale of attention with torch."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        assert float(torch.tensor(float(model.raw["hidden_size"])).rsqrt()) > 0.0
        super().describe(model, b)


@mutant(Suite, TENSORS, raises=FileNotFoundError)
class ReadsTheFolder(LlamaArchitecture):
    """Reads the model's folder, which a model that is only planned does not have."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        assert any(Path(model.path).iterdir())
        super().describe(model, b)
