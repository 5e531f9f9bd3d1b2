"""Families with checkpoints that see images, of which the text model is computed: Gemma, Ministral 3, Qwen-VL. They
refuse what they do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.architecture.family import FULL, SLIDING, Family, written_once  # noqa: F401
from tests.plugins.architecture.family import described as described_by
from tools.benchmarks.families import COMMON, PROMPT, answer, greedy, planned_logits
from transformers import AutoConfig

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.graph import Graph
from engine.contracts.ops import Attention, PositionScale, Rope, Scale
from engine.startup.build import build_engine
from engine.startup.memory.fit import plan_memory
from engine_plugins.architecture.gemma import GemmaArchitecture
from engine_plugins.architecture.ministral import MinistralArchitecture
from engine_plugins.architecture.qwen_vl import QwenVLArchitecture

BIASES = {"attention_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 28, "patch_size": 14},
    "mistral3": {"image_size": 28, "patch_size": 14, "head_dim": 8},
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def model(architecture: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **TEXT, **options}


def seeing(architecture: str, model_type: str, text: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A model with an encoder of images beside ``text``."""
    vision = SMALL | VISION[model_type]
    return {
        "architectures": [architecture], "model_type": model_type, "text_config": dict(text), "vision_config": vision,
        **options,
    }  # fmt: skip


GEMMA = model("GemmaForCausalLM", "gemma")
GEMMA2 = model(
    "Gemma2ForCausalLM", "gemma2", sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)  # fmt: skip
GEMMA3 = model("Gemma3ForCausalLM", "gemma3_text", sliding_window=8, query_pre_attn_scalar=24, sliding_window_pattern=2)
GEMMA3_SEEING = seeing("Gemma3ForConditionalGeneration", "gemma3", GEMMA3)
GROWING = YARN | {
    "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
MINISTRAL = model("MinistralForCausalLM", "ministral", sliding_window=8)
MINISTRAL3 = model("Ministral3ForCausalLM", "ministral3", rope_parameters=GROWING)
MISTRAL3 = seeing("Mistral3ForConditionalGeneration", "mistral3", TEXT | {"model_type": "mistral", "sliding_window": 8})
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
QWEN3_VL = seeing("Qwen3VLForConditionalGeneration", "qwen3_vl", TEXT | {"rope_parameters": MROPE})
QWEN2_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    "rope_parameters": MROPE | {"mrope_section": [2, 1, 1]}
}
QWEN25_VL = seeing("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", QWEN2_TEXT)
QWEN2_VL = seeing("Qwen2VLForConditionalGeneration", "qwen2_vl", QWEN2_TEXT)


def with_text(whole: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**whole, "text_config": {**whole["text_config"], **changes}}


class TestGemma(Family):
    plugin = GemmaArchitecture
    in_steps = ("gemma2", "gemma3 that sees")
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "gemma": GEMMA,
        "gemma by old keys": GEMMA | BIASES | {
            "hidden_act": "gelu", "rope_theta": 5e4, "num_key_value_heads": 1, "tie_word_embeddings": False,
        },
        "gemma2": GEMMA2,
        "gemma2 without caps": GEMMA2 | BIASES | {
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
            "hidden_activation": "silu", "layer_types": [FULL, SLIDING, SLIDING, FULL], "rope_parameters": YARN,
        },
        "gemma3": GEMMA3,
        "gemma3 by old keys": GEMMA3 | BIASES | {
            "rope_theta": 5e4, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 4.0, "tie_word_embeddings": False,
        },
        "gemma3 by type": GEMMA3 | {
            "rope_parameters": {FULL: LLAMA3, SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
        },
        "gemma3 that sees": GEMMA3_SEEING,
        "gemma3 that sees, with a head": GEMMA3_SEEING | {"tie_word_embeddings": False},
    }  # fmt: skip


class TestMinistral(Family):
    plugin = MinistralArchitecture
    answers_like = GemmaArchitecture
    in_steps = ("ministral3 that sees",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "ministral": MINISTRAL | {"layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
        "ministral with windows": MINISTRAL | {"tie_word_embeddings": True, "rope_theta": 1e6},
        "ministral3": MINISTRAL3,
        "ministral3 with a window": MINISTRAL3 | {"sliding_window": 8, "tie_word_embeddings": True},
        "ministral3 that sees": MISTRAL3 | {"text_config": MINISTRAL3, "tie_word_embeddings": False},
        "mistral that sees": MISTRAL3,
        "mistral that sees, with a head": with_text(MISTRAL3, sliding_window=None)
        | {"tie_word_embeddings": False, "multimodal_projector_bias": True},
    }


class TestQwenVL(Family):
    plugin = QwenVLArchitecture
    answers_like = GemmaArchitecture
    in_steps = ("qwen3_vl",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "qwen2_vl": QWEN2_VL,
        "qwen2_5_vl": QWEN25_VL,
        "qwen2_5_vl with windows": with_text(QWEN25_VL, use_sliding_window=True, sliding_window=8, max_window_layers=2)
        | {"tie_word_embeddings": True},
        "qwen3_vl": QWEN3_VL,
        "qwen3_vl stretched": with_text(QWEN3_VL, attention_bias=True, rope_parameters=MROPE | YARN)
        | {"tie_word_embeddings": True},
    }


PLUGINS = {
    family: suite.plugin
    for suite in (TestGemma, TestMinistral, TestQwenVL)
    for family in {model["architectures"][0] for model in suite.variants.values()}
}


def described(config: Mapping[str, Any], path: str = "/nowhere", **changes: Any) -> Graph:
    """``changes``: a value of ``...`` is a key less."""
    return described_by(PLUGINS[config["architectures"][0]], config, path, **changes)


PLAIN = (GEMMA, GEMMA2, GEMMA3, MINISTRAL, MINISTRAL3)
NESTED = (GEMMA3_SEEING, MISTRAL3, with_text(MISTRAL3, model_type="ministral3"), QWEN3_VL, QWEN25_VL, QWEN2_VL)


@pytest.mark.parametrize("config", (*PLAIN, *NESTED), ids=lambda config: config["model_type"])
def test_what_the_configuration_leaves_out_is_as_transformers_has_it(config: Mapping[str, Any]) -> None:
    given = {key: config[key] for key in ("architectures", "model_type")}
    few: dict[str, Any] = {"num_hidden_layers": 7}
    if "text_config" in config:
        kind = config["text_config"].get("model_type")
        few = {"text_config": few if kind is None else {"model_type": kind} | few}
    theirs = AutoConfig.for_model(config["model_type"], **few).to_dict()
    assert described(given | few) == described({**theirs, **given})


# Checkpoints that see images ---------------------------------------------------------------------------------------


def renamed(folder: str, into: Path, names: Mapping[str, str]) -> Path:
    """A copy of a checkpoint, with other beginnings of names."""
    into.mkdir()
    tensors = load_file(Path(folder) / "model.safetensors")
    for name in list(tensors):
        start = next(start for start in names if name.startswith(start))
        tensors[names[start] + name.removeprefix(start)] = tensors.pop(name)
    save_file(tensors, into / "model.safetensors")
    (into / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    return into


NEW_NAMES = {
    "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
}  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3 that sees", "gemma3 that sees, with a head"])
def test_old_and_new_names_are_the_same_model(name: str, tmp_path: Path) -> None:
    with TestGemma().checkpoint(name) as (written, _, _):
        folder = renamed(written.path, tmp_path / "new", NEW_NAMES)
        graph = described(TestGemma.variants[name], str(folder))
        assert graph.embedding.name == "model.language_model.embed_tokens"
        assert graph.lm_head.spec.parts[0].name == "lm_head" and graph.lm_head.tied == ("head" not in name)
        got, want = (planned_logits(PROMPT, 40, f"model.path={path}") for path in (folder, written.path))
        assert torch.equal(got, want)


def test_a_head_that_is_stored_is_no_embedding_even_if_the_configuration_says_nothing() -> None:
    """So are the first checkpoints of Mistral Small 3.1."""
    assert "tie_word_embeddings" not in MISTRAL3 | MISTRAL3["text_config"]
    with TestMinistral().checkpoint("mistral that sees, with a head") as (written, _, _):
        assert not described(MISTRAL3, written.path).lm_head.tied
    with TestMinistral().checkpoint("mistral that sees") as (written, _, _):
        assert described(MISTRAL3, written.path).lm_head.tied and described(MISTRAL3).lm_head.tied


def test_an_engine_says_what_it_does_not_read_and_drafts_with_all_of_a_model() -> None:
    """A model that drafts for itself has every draft accepted: embeddings are scaled for drafts, too."""
    with TestGemma().checkpoint("gemma3 that sees") as (written, _, theirs):
        path = written.path
        drafts = ("drafter=draft_model", f"drafter.path={path}", "drafter.adaptive=false")
        plan = assemble([*COMMON, f"model.path={path}", *drafts])
        tensors = load_file(Path(path) / "model.safetensors")
        of_text = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("language_model."))
        assert plan_memory(plan, bind(plan)).estimate.drafter == of_text
        engine = build_engine(plan)
        assert any("are not read: vision_tower.*, multi_modal_projector.*" in note for note in engine.info.notes)
        found = answer(engine.core, PROMPT)
        assert found.tokens == greedy(theirs, PROMPT, found.tokens)
        assert found.timings.accepted_tokens == found.timings.drafted_tokens > 0


# Configurations ------------------------------------------------------------------------------------------------------


def attentions(graph: Graph) -> list[Attention]:
    return [node.op for node in graph.nodes if isinstance(node.op, Attention)]


def ropes(graph: Graph) -> list[Rope]:
    return [node.op for node in graph.nodes if isinstance(node.op, Rope)]


def test_gemma_3_4b_is_read_from_what_its_config_json_has() -> None:
    """Heads, vocabulary and more are left out of it, and the length it states is that after scaling."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    graph = described(seeing("Gemma3ForConditionalGeneration", "gemma3", text))
    assert graph.embedding.vocab_size == 262208 and graph.max_position == 131072 and graph.lm_head.tied
    assert {(op.num_heads, op.num_kv_heads, op.head_dim, op.scale) for op in attentions(graph)} == {(8, 4, 256, 1 / 16)}
    assert [op.window for op in attentions(graph)[:6]] == [1024] * 5 + [None]
    local, full = ropes(graph)[0].facts, ropes(graph)[5].facts
    assert (local.theta, local.kind, full.theta, full.kind) == (1e4, "default", 1e6, "linear")
    assert full.params == {"factor": 8.0}


def test_layers_with_a_window_that_holds_every_sequence_rotate_as_those_with_one() -> None:
    wide = described(GEMMA3, sliding_window=128)
    assert [op.window for op in attentions(wide)] == [None] * 4
    assert [op.facts.theta for op in ropes(wide)] == [1e4, 1e6, 1e4, 1e6]


def test_embeddings_of_gemma_are_scaled_by_a_rounded_root() -> None:
    scale = next(node.op for node in described(GEMMA2, hidden_size=3072).nodes if isinstance(node.op, Scale))
    assert scale == Scale(3072**0.5, rounded=True)


def test_qwen2_vl_is_read_from_a_flat_config_json_with_positions_of_three_kinds() -> None:
    flat = {
        **QWEN2_VL["text_config"], "architectures": QWEN2_VL["architectures"], "model_type": "qwen2_vl",
        "rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "vision_config": {}, "tie_word_embeddings": True,
    }  # fmt: skip
    graph = described(flat)
    assert {(op.facts.kind, op.facts.theta) for op in ropes(graph)} == {("default", 1e6)} and graph.lm_head.tied


def test_queries_of_ministral_grow_from_the_length_its_rotation_was_trained_for() -> None:
    scales = [node.op for node in described(MINISTRAL3).nodes if isinstance(node.op, PositionScale)]
    assert scales == [PositionScale(0.5, 8)] * 4


REFUSED: dict[str, tuple[Mapping[str, Any], dict[str, Any], str]] = {
    "attention to what follows": (
        GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: expected False",
    ),
    "attention to what follows, in an embedder": (
        GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: expected False",
    ),
    "a cap of nothing": (GEMMA2, {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0: expected a number"),
    "capped scores": (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: expected None"),
    "no window where layers have one": (GEMMA3, {"sliding_window": None}, "sliding_window is missing"),
    "one rotation for both types of layers": (
        GEMMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        r"rope_parameters with \['rope_type', 'rope_theta'\]: expected full_attention and sliding_attention",
    ),
    "an unknown rotation": (
        GEMMA3_SEEING, {"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral': expected one of default",
    ),
    "an unknown type of layers": (
        GEMMA2, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention.*expected sliding_attention or full",
    ),
    "a scale of nothing": (GEMMA2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: expected a number larger"),
    "queries that grow by nothing said": (
        MINISTRAL3, {"rope_parameters": YARN}, "llama_4_scaling_beta is missing: expected a number",
    ),
    "queries that grow from nowhere": (
        MINISTRAL3, {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        "original_max_position_embeddings is missing: expected a whole number",
    ),
    "another text model": (MISTRAL3, {"model_type": "llama"}, "model_type=llama in text_config: expected mistral or"),
    "sections of a rotation by type of layers": (
        QWEN3_VL, {"rope_parameters": {FULL: MROPE}}, "rope_parameters differ by layer type",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_with_key_value_and_what_was_expected(name: str) -> None:
    config, changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        described(config, **changes)


@pytest.mark.parametrize("config", (*PLAIN, *NESTED), ids=lambda config: config["model_type"])
def test_an_unknown_activation_is_named(config: Mapping[str, Any]) -> None:
    key = "hidden_activation" if "gemma" in config["model_type"] and config is not GEMMA else "hidden_act"
    with pytest.raises(ValueError, match=f"{key} 'tanh' of the checkpoint: expected one of silu"):
        described(config, **{key: "tanh"})
