"""What the llama architecture makes of a ``config.json``: windows by family, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from engine.assembly.model_config import read_config
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Graph
from engine.contracts.model import DeviceFacts, ModelConfig
from engine.contracts.ops import Gated
from engine.models.record import recorded
from engine_plugins.architecture import engine_architecture
from engine_plugins.architecture.llama import LlamaArchitecture

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3"))
CPU = DeviceFacts("cpu")


def config(family: str, **changes: Any) -> ModelConfig:
    return read_config(SHAPE | {"architectures": [family]} | changes, {}, "/nowhere", "tiny")


def graph(family: str, **changes: Any) -> Graph:
    return recorded(LlamaArchitecture(SlotConfig()), config(family, **changes))


def reasons(family: str, **changes: Any) -> tuple[str, ...]:
    (provider,) = (one for one in engine_architecture() if one.name == "llama")
    return provider.unsupported(config(family, **changes), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        (MISTRAL, {"sliding_window": 100}, (100,) * 4),
        (MISTRAL, {"sliding_window": None}, (None,) * 4),
        (MISTRAL, {}, (None,) * 4),
        (LLAMA, {"sliding_window": 100}, (None,) * 4),
        (LLAMA, {"sliding_window": 100, "use_sliding_window": True}, (None,) * 4),
        (QWEN2, {"sliding_window": 100}, (None,) * 4),
        (QWEN3, {"sliding_window": 100, "use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        (QWEN2, {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 100)),
        (QWEN2, {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0}, (100,) * 4),
        (QWEN2, {"sliding_window": 100, "use_sliding_window": True}, (None,) * 4),
        (
            QWEN3,
            {
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (100, None, None, 100),
        ),
    ],
)
def test_attention_windows_follow_the_familys_rule(
    family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert tuple(cache.reach.tokens for cache in graph(family, **changes).caches) == windows


SOME = {"use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"), [(LLAMA, {}), (MISTRAL, {}), (QWEN2, {}), (QWEN3, {}), (QWEN2, SOME), (QWEN3, SOME)]
)
def test_what_the_configuration_may_leave_out_is_as_transformers_has_it(family: str, changes: dict[str, Any]) -> None:
    kept = ("vocab_size", "intermediate_size", "num_hidden_layers")
    given = {key: SHAPE[key] for key in kept} | {"hidden_size": 256, "num_attention_heads": 32} | changes
    theirs = AutoConfig.for_model(family.removesuffix("ForCausalLM").lower(), **given).to_dict()
    read = [read_config({**whole, "architectures": [family]}, {}, "/nowhere", "m") for whole in (given, theirs)]
    ours, whole = (recorded(LlamaArchitecture(SlotConfig()), model) for model in read)
    assert ours == whole


@pytest.mark.parametrize(("window", "positions", "found"), [(511, 512, 511), (512, 512, None), (4096, 512, None)])
def test_a_window_that_holds_every_sequence_is_none(window: int, positions: int, found: int | None) -> None:
    made = graph(MISTRAL, sliding_window=window, max_position_embeddings=positions)
    assert {cache.reach.tokens for cache in made.caches} == {found}
    assert made.max_position == positions


def test_a_window_is_compared_with_the_positions_that_the_rotation_reaches() -> None:
    stretched = {"rope_type": "linear", "factor": 4.0}
    made = graph(MISTRAL, sliding_window=512, rope_scaling=stretched)
    assert made.max_position == 2048 and {cache.reach.tokens for cache in made.caches} == {512}


@pytest.mark.parametrize(
    ("name", "act"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), (None, "silu")]
)
def test_activations_are_those_of_the_checkpoint(name: str | None, act: str) -> None:
    gated = [node.op for node in graph(LLAMA, hidden_act=name).nodes if isinstance(node.op, Gated)]
    assert [op.act for op in gated] == [act] * 4


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (LLAMA, {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' of the checkpoint: expected one of silu, "),
        (LLAMA, {"hidden_size": None}, "config.json lacks hidden_size"),
        (LLAMA, {"attention_bias": "yes"}, "attention_bias='yes': expected true or false"),
        (LLAMA, {"rope_scaling": {"rope_type": "odd"}}, "rope type 'odd': expected one of default, "),
        (MISTRAL, {"sliding_window": -1}, "sliding_window=-1: expected a whole number from 1"),
        (MISTRAL, {"sliding_window": 8, "layer_types": ["odd"] * 4}, "layer_types ['odd']: expected sliding_attention"),
        (
            QWEN2,
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers=-1: expected a whole number from 0",
        ),
    ],
)
def test_what_it_cannot_describe_is_named_with_what_was_expected(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        graph(family, **changes)
    assert words in str(raised.value) and str(raised.value).isprintable()


def test_it_computes_four_families_and_says_which() -> None:
    assert [reasons(family) for family in (LLAMA, MISTRAL, QWEN2, QWEN3)] == [()] * 4
    assert reasons("MambaForCausalLM") == (f"it computes {LLAMA}, {MISTRAL}, {QWEN2}, {QWEN3}",)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_checkpoint_of_experts_is_refused_whatever_it_calls_itself(key: str) -> None:
    (reason,) = reasons(MISTRAL, **{key: 8})
    assert reason == f"it computes no experts, and config.json says {key}=8"
    assert reasons(MISTRAL, **{key: 0}) == reasons(MISTRAL, **{key: None}) == ()
