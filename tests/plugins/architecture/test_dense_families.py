"""Dense families beside Llama's describe what transformers computes; they refuse what they do not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from tests.plugins.architecture.family import FULL, SLIDING, Family, written_once  # noqa: F401
from tests.plugins.architecture.family import described as described_by
from tools.benchmarks.families import PROMPT, difference, logits_of, planned_logits, rounding_of
from transformers import AutoConfig

from engine.contracts.graph import EVERY_TOKEN, Graph
from engine_plugins.architecture.cohere import CohereArchitecture
from engine_plugins.architecture.ernie import ErnieArchitecture
from engine_plugins.architecture.exaone4 import Exaone4Architecture
from engine_plugins.architecture.glm import GlmArchitecture
from engine_plugins.architecture.granite import GraniteArchitecture
from engine_plugins.architecture.hunyuan import HunyuanArchitecture
from engine_plugins.architecture.olmo import OlmoArchitecture
from engine_plugins.architecture.phi3 import Phi3Architecture
from engine_plugins.architecture.seed_oss import SeedOssArchitecture
from engine_plugins.architecture.smollm3 import SmolLM3Architecture
from engine_plugins.architecture.starcoder2 import Starcoder2Architecture

BIASES = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def shape(family: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": model_type, "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, **options,
    }  # fmt: skip


SMOLLM3 = shape("SmolLM3", "smollm3")
SEED_OSS = shape("SeedOss", "seed_oss", head_dim=8)
GRANITE = shape("Granite", "granite")
OLMO2, OLMO3 = shape("Olmo2", "olmo2"), shape("Olmo3", "olmo3", sliding_window=8)
EXAONE4 = shape("Exaone4", "exaone4", sliding_window=8)
PHI3 = shape("Phi3", "phi3")
STARCODER2 = shape("Starcoder2", "starcoder2")
GLM, GLM4 = shape("Glm", "glm", head_dim=16), shape("Glm4", "glm4", head_dim=16)
HUNYUAN = shape("HunYuanDenseV1", "hunyuan_v1_dense", head_dim=16)
ERNIE = shape("Ernie4_5", "ernie4_5", head_dim=16, tie_word_embeddings=True)
COHERE, COHERE2 = shape("Cohere", "cohere"), shape("Cohere2", "cohere2", sliding_window=8)


def longrope(pairs: int, kind: str, trained: int, **options: Any) -> dict[str, Any]:
    """``trained``: most tokens with the short factors."""
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [2.0 + i for i in range(pairs)]
    rope = {"type": kind, "rope_type": kind, "short_factor": short, "long_factor": long, **options}
    return {"rope_scaling": rope, "original_max_position_embeddings": trained}


class TestSmolLM3(Family):
    plugin = SmolLM3Architecture
    is_like_llama = True
    in_steps = ("smollm3 by layer",)
    variants: ClassVar = {
        "smollm3": SMOLLM3 | {"tie_word_embeddings": True},
        "smollm3 with windows": SMOLLM3 | {
            "use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2
        },
        "smollm3 by layer": SMOLLM3 | BIASES | {
            "use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "no_rope_layers": [0, 1, 1, 0, 1], "rope_parameters": LLAMA3 | {"rope_theta": 5e6},
        },
    }  # fmt: skip


class TestSeedOss(Family):
    plugin = SeedOssArchitecture
    is_like_llama = True
    in_steps = ("seed_oss",)
    variants: ClassVar = {
        "seed_oss": SEED_OSS,
        "seed_oss with other biases": SEED_OSS | {
            "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
            "head_dim": None, "rope_theta": 1e6,
        },
    }  # fmt: skip


class TestGranite(Family):
    plugin = GraniteArchitecture
    is_like_llama = True
    in_steps = ("granite with multipliers", "granite with biases")
    variants: ClassVar = {
        "granite": GRANITE,
        "granite with multipliers": GRANITE | {
            "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.125, "logits_scaling": 8,
            "tie_word_embeddings": True, "rope_theta": 1e6,
        },
        "granite with biases": GRANITE | BIASES | {"hidden_act": "gelu", "attention_multiplier": 0.35},
    }  # fmt: skip


class TestOlmo(Family):
    plugin = OlmoArchitecture
    in_steps = ("olmo2", "olmo3")
    variants: ClassVar = {
        "olmo2": OLMO2,
        "olmo2 with biases": OLMO2 | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None},
        "olmo3": OLMO3 | {"rope_scaling": dict(YARN)},
        "olmo3 by layer": OLMO3 | {
            "layer_types": [FULL, SLIDING, FULL, SLIDING], "attention_bias": True,
            "rope_parameters": {
                FULL: {**YARN, "rope_theta": 5e5, "attention_factor": 1.2}, SLIDING: {"rope_theta": 1e4},
            },
        },
        "olmo3 of full layers": OLMO3 | {"layer_types": [FULL] * 4},
    }  # fmt: skip


class TestExaone4(Family):
    plugin = Exaone4Architecture
    is_like_llama = True  # or Olmo 3
    in_steps = ("exaone4",)
    variants: ClassVar = {
        "exaone4": EXAONE4,
        "exaone4 with another pattern": EXAONE4 | {"sliding_window_pattern": 2, "tie_word_embeddings": True},
        "exaone4 by layer": EXAONE4 | {
            "sliding_window_pattern": "LG", "layer_types": [SLIDING, FULL, SLIDING, FULL], "head_dim": 16,
            "rope_parameters": LLAMA3 | {"rope_theta": 1e6},
        },
        "exaone4 without windows": EXAONE4 | {"sliding_window": None, "layer_types": [FULL] * 4},
    }  # fmt: skip


class TestPhi3(Family):
    plugin = Phi3Architecture
    is_like_llama = True
    in_steps = ("phi3 beyond the trained length",)
    rounding_error = 0.12  # its longrope makes scores 3.5 times as large: the softmax is all but a choice
    variants: ClassVar = {
        "phi3": PHI3 | {"sliding_window": 8},
        "phi4": PHI3 | {"num_attention_heads": 2, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        "phi3 up to the trained length": PHI3 | longrope(4, "longrope", trained=128),
        "phi3 beyond the trained length": PHI3 | {"num_attention_heads": 2, "partial_rotary_factor": 0.5}
        | longrope(4, "longrope", trained=4),
        "phi3 beyond it, with another name": PHI3 | longrope(4, "yarn", trained=4, factor=16.0, attention_factor=1.3),
    }  # fmt: skip


class TestStarcoder2(Family):
    plugin = Starcoder2Architecture
    is_like_llama = True
    in_steps = ("starcoder2",)
    variants: ClassVar = {
        "starcoder2": STARCODER2 | {"tie_word_embeddings": True},
        "starcoder2 with a window": STARCODER2 | {"use_bias": False, "sliding_window": 8, "hidden_act": "relu"},
    }


class TestCohere(Family):
    plugin = CohereArchitecture
    in_steps = ("cohere with head norms", "cohere2")
    variants: ClassVar = {
        "cohere": COHERE | {"tie_word_embeddings": True},
        "cohere with head norms": COHERE | {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.25},
        "cohere2": COHERE2 | {"tie_word_embeddings": True},
        "cohere2 with another pattern": COHERE2 | {"sliding_window_pattern": 2, "logit_scale": 1.5},
        "cohere2 by layer": COHERE2 | {
            "layer_types": [FULL, SLIDING, SLIDING, FULL], "attention_bias": True, "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        },
    }  # fmt: skip


class TestGlm(Family):
    plugin = GlmArchitecture
    is_like_llama = True
    in_steps = ("glm4",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "glm": GLM,
        "glm4": GLM4,
        "glm4 rotated whole": GLM4 | {
            "attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0, "hidden_act": "gelu",
        },
        "glm4 stretched": GLM4 | {"rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    }  # fmt: skip


class TestHunyuan(Family):
    plugin = HunyuanArchitecture
    is_like_llama = True
    in_steps = ("hunyuan with alpha",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "hunyuan": HUNYUAN,
        "hunyuan with alpha": HUNYUAN | BIASES | {
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "tie_word_embeddings": True,
        },
    }  # fmt: skip


class TestErnie(Family):
    plugin = ErnieArchitecture
    is_like_llama = True
    in_steps = ("ernie",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "ernie": ERNIE,
        "ernie with biases": ERNIE | {"use_bias": True, "tie_word_embeddings": False},
    }


@pytest.mark.parametrize(("suite", "name"), [(TestGranite, "granite with multipliers"), (TestCohere, "cohere")])
def test_logits_of_models_in_16_bits_are_scaled_as_they_are(suite: type[Family], name: str) -> None:
    """They are float32 where all that comes before them is not."""
    with suite().checkpoint(name) as (model, _, theirs):
        got = planned_logits(PROMPT, len(PROMPT), f"model.path={model.path}", "model.dtype=bfloat16")
        assert rounding_of(got, logits_of(theirs, PROMPT)) < 0.1


class Phi3OfBothLengths(TestPhi3):
    variants: ClassVar = {"phi3 of both lengths": PHI3 | longrope(4, "longrope", trained=32)}


def test_model_max_len_decides_for_which_lengths_phi3_rotates() -> None:
    """transformers decides by the sequence: 30 tokens are within the trained length."""
    with Phi3OfBothLengths().checkpoint("phi3 of both lengths") as (model, _, theirs):
        want, path = logits_of(theirs, PROMPT), f"model.path={model.path}"
        assert difference(planned_logits(PROMPT, len(PROMPT), path, "model.max_len=32"), want) < 1e-4
        assert difference(planned_logits(PROMPT, len(PROMPT), path, "model.max_len=33"), want) > 0.1


PLUGINS = {
    family: suite.plugin
    for suite in (
        TestSmolLM3, TestSeedOss, TestGranite, TestOlmo, TestExaone4, TestPhi3, TestStarcoder2, TestCohere, TestGlm,
        TestHunyuan, TestErnie,
    )
    for family in {model["architectures"][0] for model in suite.variants.values()}
}  # fmt: skip


def described(config: Mapping[str, Any], **changes: Any) -> Graph:
    """``changes``: a value of ``...`` is a key less."""
    return described_by(PLUGINS[config["architectures"][0]], config, **changes)


ALL = (SMOLLM3, SEED_OSS, GRANITE, OLMO2, OLMO3, EXAONE4, PHI3, STARCODER2, COHERE, COHERE2, GLM, GLM4, HUNYUAN, ERNIE)


@pytest.mark.parametrize("config", ALL, ids=lambda config: config["model_type"])
def test_what_the_configuration_leaves_out_is_as_transformers_has_it(config: Mapping[str, Any]) -> None:
    kept = ("architectures", "model_type", "num_hidden_layers")
    given = {key: config[key] for key in kept}
    theirs = AutoConfig.for_model(config["model_type"], num_hidden_layers=4).to_dict()
    assert described(given) == described({**theirs, **given})


@pytest.mark.parametrize("config", ALL, ids=lambda config: config["model_type"])
def test_an_unknown_activation_and_a_share_of_a_rotation_are_named(config: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="hidden_act 'tanh' of the checkpoint: expected one of silu"):
        described(config, hidden_act="tanh")
    if config not in (PHI3, GLM, GLM4):
        with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5: expected 1"):
            described(config, partial_rotary_factor=0.5)


SPLIT = {"rope_parameters": {FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e5}}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a list of rotated layers that is too short": (
        SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers",
    ),
    "a layer that rotates by half": (SMOLLM3, {"no_rope_layers": [1, 1, 2, 0]}, r"no_rope_layers=\[1, 1, 2, 0\]"),
    "windows that are not used": (
        SMOLLM3, {"sliding_window": 8, "layer_types": [SLIDING] * 4}, "layer_types=.*expected .'full_attention'",
    ),
    "layers with a window of no size": (
        SMOLLM3, {"use_sliding_window": True, "layer_types": [SLIDING] * 4}, "sliding_window is missing",
    ),
    "rotations by type of layers that a family has not": (SMOLLM3, SPLIT, "rope_parameters"),
    "a multiplier of nothing": (GRANITE, {"residual_multiplier": 0}, "residual_multiplier=0: expected a number larger"),
    "an endless multiplier": (GRANITE, {"logits_scaling": 1e9}, "logits_scaling=1000000000.0: expected .* at most"),
    "clipped queries": (OLMO2, {"clip_qkv": 8.0}, "clip_qkv=8.0: expected None"),
    "one rotation for both types of layers": (
        OLMO3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"rope_parameters has \['rope_theta'",
    ),
    "a base for some layers": (OLMO3, {"rope_theta": 1e4}, "rope_theta=10000.0: expected 500000.0"),
    "an unknown type of layers": (
        OLMO3, {"layer_types": ["linear_attention"] * 4}, "linear_attention.*expected sliding_attention or full",
    ),
    "types of too few layers": (COHERE2, {"layer_types": [FULL]}, "layer_types has 1 entries for 4 layers"),
    "a pattern of letters": (
        EXAONE4, {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG': expected a whole number",
    ),
    "no window where layers have one": (COHERE2, {"sliding_window": None}, "sliding_window is missing"),
    "a rotation of another kind": (
        PHI3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear': expected one of default",
    ),
    "factors of too few pairs": (PHI3, longrope(3, "longrope", trained=4), "short_factor=.*expected 4 numbers"),
    "an MLP with a gate": (STARCODER2, {"mlp_type": "gated"}, "mlp_type='gated': expected 'default'"),
    "another norm": (STARCODER2, {"norm_type": "rms_norm"}, "norm_type='rms_norm': expected 'layer_norm'"),
    "blocks one after another": (COHERE2, {"use_parallel_block": False}, "use_parallel_block=False: expected True"),
    "norms of heads where they have no names": (COHERE2, {"use_qk_norm": True}, "use_qk_norm=True: expected False"),
    "a scale of nothing": (COHERE, {"logit_scale": 0.0}, "logit_scale=0.0: expected a number larger than 0"),
    "rotations by type of layers that GLM has not": (
        GLM4, {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "rope_parameters differ by layer type",
    ),
    "three rotated dimensions": (
        GLM4, {"partial_rotary_factor": 0.2}, "3 dimensions of each head are rotated: expected an even number",
    ),
    "a dynamic rotation without a factor": (
        HUNYUAN, {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "rope type 'dynamic' has no 'factor'",
    ),
    "an endless alpha": (
        HUNYUAN, {"rope_scaling": {"type": "dynamic", "alpha": 1e9, "factor": 1.0}}, "alpha=1000000000.0: expected",
    ),
    "biases of half": (ERNIE, {"use_bias": 0.5}, "use_bias=0.5: expected true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_with_key_value_and_what_was_expected(name: str) -> None:
    config, changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        described(config, **changes)


def test_a_window_that_holds_every_sequence_does_not_change_which_layers_rotate() -> None:
    for config in (EXAONE4, COHERE2):
        kinds = [[type(node.op).__name__ for node in layer.nodes] for layer in described(config).layers]
        wide = described(config, sliding_window=4096)
        assert [[type(node.op).__name__ for node in layer.nodes] for layer in wide.layers] == kinds
        assert {cache.reach for cache in wide.caches} == {EVERY_TOKEN}
