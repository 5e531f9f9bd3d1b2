"""Sizes, positions and windows under the keys that almost every family uses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.checkpoint.files import CheckpointError
from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.ops import RopeFacts

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING, FULL = "sliding_attention", "full_attention"


def sizes(layer_type: str | None = None, **changes: Any) -> DecoderSizes:
    return read_sizes(Values(CONFIG | changes), layer_type=layer_type)


def windows(every: bool = False, **config: Any) -> tuple[int | None, ...]:
    return windows_by_layer(Values(config), 4, every=every)


def test_sizes_are_those_that_the_checkpoint_states() -> None:
    read = sizes(rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert (read.vocab_size, read.hidden_size, read.num_layers, read.intermediate_size) == (256, 64, 4, 128)
    assert (read.num_heads, read.num_kv_heads, read.head_dim, read.max_position) == (4, 2, 16, 512)
    assert (read.eps, read.tied) == (1e-5, True)


def test_missing_head_counts_have_their_usual_defaults() -> None:
    assert sizes(num_key_value_heads=None).num_kv_heads == 4
    assert sizes(head_dim=32).head_dim == 32
    assert sizes(head_dim=None).head_dim == 16


def test_what_families_differ_in_has_the_default_of_the_family() -> None:
    values = Values(CONFIG | {"norm_epsilon": 0.25})
    assert (sizes().eps, sizes().tied) == (1e-6, False)
    assert (read_sizes(values, eps=1e-3).eps, read_sizes(values, tied=True).tied) == (1e-3, True)
    assert read_sizes(values, eps_key="norm_epsilon").eps == 0.25


def test_without_a_rotation_there_is_the_plain_one() -> None:
    rope = sizes().rope
    assert (rope.kind, rope.theta, rope.rotary_dim, dict(rope.params)) == ("default", 10000.0, None, {})


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_spellings_of_rope_mean_the_same(spelling: dict[str, Any]) -> None:
    read = sizes(**spelling)
    assert (read.rope.kind, read.rope.theta, dict(read.rope.params)) == ("linear", 5e5, {"factor": 4.0})
    assert read.max_position == 2048


@pytest.mark.parametrize(
    ("params", "reach"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", **STRETCHED, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 512),
        ({"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 512),
    ],
)
def test_every_scaled_kind_says_how_far_it_reaches_and_keeps_its_numbers(params: dict[str, Any], reach: int) -> None:
    read = sizes(rope_scaling=params, original_max_position_embeddings=None)
    assert read.max_position == reach
    assert read.rope.kind == {"su": "longrope"}.get(params.get("type", ""), params.get("rope_type", "longrope"))
    for key, value in params.items():
        if key not in ("type", "rope_type"):
            assert read.rope.params[key] == value
    assert read.rope.params["original_max_position_embeddings"] == params.get("original_max_position_embeddings", 512)


BY_TYPE = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: {"partial_rotary_factor": 0.5}}


def test_rotations_may_differ_by_type_of_layers() -> None:
    read = sizes(rope_parameters=BY_TYPE, rope_theta=5e5, layer_type=FULL)
    assert (read.rope, read.max_position) == (RopeFacts(1e6, "linear", params={"factor": 8.0}), 4096)
    assert sizes(rope_parameters=BY_TYPE, rope_theta=5e5, layer_type=SLIDING).rope == RopeFacts(5e5, rotary_dim=8)
    assert sizes(rope_scaling=BY_TYPE[FULL], layer_type=SLIDING).rope == read.rope, "one for all"


@pytest.mark.parametrize(
    ("config", "layer_type", "words"),
    [
        ({"rope_parameters": BY_TYPE}, None, f"rope_parameters differ by layer type (['{FULL}', '{SLIDING}'])"),
        ({"rope_parameters": BY_TYPE | {SLIDING: None}}, SLIDING, f"has no '{SLIDING}': found ['{FULL}']"),
        ({"rope_parameters": BY_TYPE, "rope_scaling": {"factor": 2.0}}, FULL, "expected rope_parameters alone"),
        ({"rope_scaling": BY_TYPE}, FULL, "expected rope_parameters alone"),
    ],
)
def test_rotations_of_some_layers_are_not_taken_for_those_of_others(
    config: dict[str, Any], layer_type: str | None, words: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        sizes(**config, layer_type=layer_type)


def test_partial_rotation() -> None:
    assert sizes(partial_rotary_factor=0.5).rope.rotary_dim == 8
    assert sizes(rope_parameters={"partial_rotary_factor": 0.25}).rope.rotary_dim == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks hidden_size, vocab_size"),
        ({"hidden_size": "64"}, "hidden_size='64': expected a whole number from 1 to 262144 (MAX_HIDDEN_SIZE)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: expected a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: expected a number larger than 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': expected true or false"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope': expected one of default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' has no 'factor'"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.1}, "1 dimensions of each head are rotated: expected an even number"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_was_expected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        sizes(**changes)
    assert words in str(raised.value) and str(raised.value).isprintable()


def test_without_a_window_every_layer_attends_to_all() -> None:
    assert windows(every=True) == windows(layer_types=[FULL] * 4) == (None,) * 4


def test_a_window_without_types_of_layers_is_every_layers_or_none() -> None:
    assert windows(sliding_window=100) == (None,) * 4
    assert windows(sliding_window=100, every=True) == (100,) * 4


def test_types_of_layers_say_which_have_the_window() -> None:
    types = [SLIDING, FULL, FULL, SLIDING]
    for every in (False, True):
        assert windows(sliding_window=100, layer_types=types, every=every) == (100, None, None, 100)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sliding_window": 0}, "sliding_window=0: expected a whole number from 1"),
        ({"sliding_window": "9"}, "sliding_window='9': expected a whole number from 1"),
        ({"layer_types": [FULL, FULL, FULL, SLIDING]}, "sliding_window is missing: expected one for"),
        ({"layer_types": [FULL] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"sliding_window": 9, "layer_types": [FULL] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"sliding_window": 9, "layer_types": [FULL, FULL, "odd", FULL]}, "layer_types ['odd']: expected sliding_att"),
        ({"sliding_window": 9, "layer_types": "full"}, "layer_types='full': expected a list of at most"),
    ],
)
def test_windows_that_cannot_be_are_named_with_what_was_expected(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        windows(**config)
    assert words in str(raised.value)
