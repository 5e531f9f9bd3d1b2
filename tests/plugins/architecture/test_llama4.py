"""Llama 4 computes what transformers does; what it does not compute is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from tests.plugins.architecture.family import FULL, SLIDING, Family, written_once  # noqa: F401
from tests.plugins.architecture.family import described as described_by
from transformers import AutoConfig

from engine.contracts.graph import Graph, Reach
from engine.contracts.ops import Attention, Experts, PositionScale, Rope
from engine_plugins.architecture.llama4 import Llama4Architecture

CHUNKED = "chunked_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "num_local_experts": 4, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""Temperatures grow and chunks end within the sequences that are compared."""
LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", **TEXT}
SEEING: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": TEXT | {"model_type": "llama4_text"},
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    },
}  # fmt: skip


class TestLlama4(Family):
    plugin = Llama4Architecture
    in_steps = ("llama4", "llama4 that sees")
    kernels = ("reference", "torch", "native")
    rounding_error = 0.3  # another expert for a token that is all but undecided
    variants: ClassVar = {
        "llama4": LLAMA4 | {"interleave_moe_layer_step": 2, "rope_parameters": LLAMA3},
        "llama4 with two experts": LLAMA4 | {"num_experts_per_tok": 2, "attention_bias": True},
        "llama4 without norms of heads": LLAMA4 | {
            "use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [1], "no_rope_layers": [1, 0, 1, 0],
            "tie_word_embeddings": True, "hidden_act": "gelu",
        },
        "llama4 with chunks where it does not rotate": LLAMA4 | {
            "layer_types": [FULL, CHUNKED, CHUNKED, FULL], "no_rope_layer_interval": 2, "moe_layers": [],
        },
        "llama4 that sees": SEEING,
    }  # fmt: skip


def described(config: Mapping[str, Any], path: str = "/nowhere", **changes: Any) -> Graph:
    return described_by(Llama4Architecture, config, path, **changes)


def ops(graph: Graph, kind: type[Any]) -> list[Any]:
    return [node.op for node in graph.nodes if isinstance(node.op, kind)]


@pytest.mark.parametrize("config", [LLAMA4, SEEING], ids=lambda config: config["model_type"])
def test_what_the_configuration_leaves_out_is_as_transformers_has_it(config: Mapping[str, Any]) -> None:
    given = {key: config[key] for key in ("architectures", "model_type")}
    few: dict[str, Any] = {"num_hidden_layers": 7}
    few = {"text_config": few} if "text_config" in config else few
    theirs = AutoConfig.for_model(config["model_type"], **few).to_dict()
    assert described(given | few) == described({**theirs, **given})


def test_scout_is_read_from_what_its_config_json_has() -> None:
    """Chunks in three layers of four, which are those that rotate; a context of ten million tokens."""
    text = {
        "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192,
        "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760, "model_type": "llama4_text",
        "moe_layers": list(range(48)), "no_rope_layers": [], "rope_theta": 500000.0, "use_qk_norm": True,
        "rope_scaling": LLAMA3,
    }  # fmt: skip
    graph = described(SEEING | {"text_config": text})
    assert graph.max_position == 10485760 and len(ops(graph, Experts)) == 48
    assert [op.chunk for op in ops(graph, Attention)] == [8192, 8192, 8192, None] * 12
    assert ops(graph, PositionScale) == [PositionScale(0.1, 8192, 1)] * 12
    assert all(op.facts.interleaved and op.facts.kind == "llama3" for op in ops(graph, Rope))
    assert {cache.reach for cache in graph.caches} == {Reach("chunked", 8192), Reach()}


def test_a_chunk_that_holds_every_sequence_is_none() -> None:
    assert {op.chunk for op in ops(described(LLAMA4, attention_chunk_size=128), Attention)} == {None}
    assert {op.chunk for op in ops(described(LLAMA4, attention_chunk_size=127), Attention)} == {127, None}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type of layers": (
        {"layer_types": [SLIDING] * 4}, "layer_types ['sliding_attention']: expected chunked_attention or full",
    ),
    "layers without a type": ({"layer_types": [FULL]}, "layer_types has 1 entries for 4 layers"),
    "layers that may rotate": ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
    "chunks of no size": ({"attention_chunk_size": None}, "attention_chunk_size is missing: expected a whole number"),
    "a temperature that is a number": (
        {"attn_temperature_tuning": 4}, "attn_temperature_tuning=4: expected true or false",
    ),
    "heads that are rotated in part": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5: expected 1",
    ),
    "more experts of a token than there are": ({"num_experts_per_tok": 5}, "num_experts_per_tok=5: expected at most 4"),
    "experts in a layer that there is not": ({"moe_layers": [1, 7]}, "moe_layers with [7]: expected numbers below 4"),
    "an unknown activation": ({"hidden_act": "tanh"}, "hidden_act 'tanh' of the checkpoint: expected one of silu"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(reason)):
        described(LLAMA4, **changes)
