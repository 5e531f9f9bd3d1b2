"""Gemma 4 computes what transformers does; what it does not compute is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from tests.plugins.architecture.family import FULL, SLIDING, Family, written_once  # noqa: F401
from tests.plugins.architecture.family import described as described_by
from tools.benchmarks.families import COMMON, PROMPT, answer, greedy
from transformers import AutoConfig

from engine.assembly.assemble import assemble
from engine.contracts.graph import Graph, KVSpec, Reach
from engine.contracts.ops import Attention, Embed, KVWrite, Linear, Rope
from engine.startup.build import build_engine
from engine_plugins.architecture.gemma4 import Gemma4Architecture

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 128,
    "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL], "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **TEXT}
SHARED = {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 3}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
SEEING: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "text_config": TEXT | SHARED | {
        "model_type": "gemma4_text", "use_bidirectional_attention": "vision", "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16,
    },
    "audio_config": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
        "output_proj_dims": 16,
    },
}  # fmt: skip


class TestGemma4(Family):
    plugin = Gemma4Architecture
    in_steps = ("gemma4 with shared caches", "gemma4 with experts", "gemma4 that sees and hears")
    kernels = ("reference", "torch", "native")
    rounding_error = 0.3  # another expert for a token that is all but undecided
    variants: ClassVar = {
        "gemma4": GEMMA4 | {"final_logit_softcapping": 10.0, "attention_bias": True},
        "gemma4 with shared caches": GEMMA4 | SHARED | {"use_double_wide_mlp": True},
        "gemma4 with keys as values": GEMMA4 | {
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        },
        "gemma4 with experts": GEMMA4 | EXPERTS | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        "gemma4 with experts and inputs": GEMMA4 | EXPERTS | {
            "tie_word_embeddings": False, "hidden_activation": "silu",
        },
        "gemma4 that sees and hears": SEEING,
    }  # fmt: skip


def described(config: Mapping[str, Any], path: str = "/nowhere", **changes: Any) -> Graph:
    return described_by(Gemma4Architecture, config, path, **changes)


def ops(graph: Graph, kind: type[Any]) -> list[Any]:
    return [node.op for node in graph.nodes if isinstance(node.op, kind)]


@pytest.mark.parametrize("config", [GEMMA4, SEEING], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 2}])
def test_what_the_configuration_leaves_out_is_as_transformers_has_it(
    config: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    given = {key: config[key] for key in ("architectures", "model_type")}
    few: dict[str, Any] = {"num_hidden_layers": 7, **changes}
    few = {"text_config": few} if "text_config" in config else few
    theirs = AutoConfig.for_model(config["model_type"], **few).to_dict()
    assert described(given | few) == described({**theirs, **given})


def test_the_last_layers_read_caches_that_earlier_ones_write() -> None:
    """Of the last layer of their type with keys of its own: windows see windows."""
    graph = described(GEMMA4 | SHARED)
    read = [node.cache for node in graph.nodes if isinstance(node.op, Attention)]
    assert read == [0, 1, 2, 1, 2, 1]
    assert [node.cache for node in graph.nodes if isinstance(node.op, KVWrite)] == [0, 1, 2]
    assert graph.caches == (KVSpec(2, 8, Reach("window", 8)), KVSpec(2, 16), KVSpec(2, 8, Reach("window", 8)))
    assert [op.window for op in ops(graph, Attention)] == [8, None] * 3
    assert graph.ignored[:2] == ("model.layers.3.self_attn.k_proj.", "model.layers.3.self_attn.v_proj.")


def test_e2b_is_read_from_what_its_config_json_has() -> None:
    """Heads of 512 without a window; the last 20 of 35 layers are twice as wide and attend to layers 13 and 14."""
    text = {
        "attention_k_eq_v": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "num_hidden_layers": 35,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7, "model_type": "gemma4_text", "num_attention_heads": 8,
        "num_global_key_value_heads": None, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "sliding_window": 512, "rope_parameters": None,
    }  # fmt: skip
    graph = described(SEEING | {"text_config": text})
    assert len(graph.caches) == 15 and graph.lm_head.tied
    assert [node.cache for node in graph.nodes if isinstance(node.op, Attention)][15:20] == [13, 13, 13, 13, 14]
    assert {(op.head_dim, op.num_kv_heads, op.scale, op.window) for op in ops(graph, Attention)} == {
        (256, 1, 1.0, 512), (512, 1, 1.0, None),
    }  # fmt: skip
    assert {(op.facts.kind, op.head_dim) for op in ops(graph, Rope)} == {("default", 256), ("proportional", 512)}
    assert [op.size for op in ops(graph, Embed)] == [1536, 35 * 256]
    widths = [op.spec.in_features for op in ops(graph, Linear) if op.spec.parts[0].name.endswith("mlp.down_proj")]
    assert widths == [6144] * 15 + [12288] * 20


@pytest.mark.parametrize("name", ["gemma4 with shared caches", "gemma4 with experts and inputs"])
def test_a_model_that_drafts_for_itself_has_every_draft_accepted(name: str) -> None:
    """Drafts are computed from the inputs of each layer, too, on caches of the model's sizes."""
    with TestGemma4().checkpoint(name) as (written, _, theirs):
        drafts = ("drafter=draft_model", f"drafter.path={written.path}", "drafter.adaptive=false")
        engine = build_engine(assemble([*COMMON, f"model.path={written.path}", *drafts]))
        found = answer(engine.core, PROMPT)
        assert found.tokens == greedy(theirs, PROMPT, found.tokens)
        assert found.timings.accepted_tokens == found.timings.drafted_tokens > 0


def test_an_engine_says_what_it_does_not_read_and_runs_steps_as_programs() -> None:
    with TestGemma4().checkpoint("gemma4 that sees and hears") as (written, _, _):
        engine = build_engine(assemble([*COMMON, f"model.path={written.path}"]))
        (note,) = engine.info.notes
        assert re.search(r"are not read: model.vision_tower.\*, model.embed_vision.\*, model.audio_tower.\*", note)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention to what follows": (
        {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all': expected None",
    ),
    "one rotation for both types of layers": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_parameters with ['rope_type', 'rope_theta']: expected full_attention and sliding_attention",
    ),
    "no rotation of a type of layers": (
        {"rope_parameters": {FULL: {"rope_type": "default"}}}, "rope_parameters has no 'sliding_attention'",
    ),
    "shared caches that nobody writes": (
        {"num_kv_shared_layers": 3}, "num_kv_shared_layers=3: no layer before them is of type full_attention",
    ),
    "layers that differ in something else": (
        {"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config with ['hidden_size']: expected head_dim",
    ),
    "inputs of fewer tokens": (
        {"vocab_size_per_layer_input": 32}, "vocab_size_per_layer_input=32: expected vocab_size, 96",
    ),
    "experts of no number": ({"enable_moe_block": True}, "num_experts is missing: expected a whole number"),
    "an unknown type of layers": (
        {"layer_types": ["chunked_attention"] * 4}, "chunked_attention']: expected sliding_attention or full_attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(reason)):
        described(GEMMA4, **changes)
