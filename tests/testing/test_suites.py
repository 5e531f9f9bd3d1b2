"""Which suite ``engine plugins check`` makes of what a plugin offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.assembly.discovery import discover
from engine.cli.plugins.check import trial_of
from engine.cli.plugins.named import find_offer
from engine.contracts.config import PluginSettings
from engine.testing.architecture import ArchitectureConformance
from engine.testing.attention_kernel import AttentionKernelConformance
from engine.testing.attention_kernel import NativeConformance as NativeAttentionConformance
from engine.testing.communicator import CommunicatorConformance
from engine.testing.communicator import NativeConformance as NativeCommunicatorConformance
from engine.testing.drafter import DeviceDrafterConformance, HostDrafterConformance
from engine.testing.kv_allocator import (
    KVAllocatorConformance,
    PartialBlockConformance,
    PrefixCachingConformance,
    two_groups,
)
from engine.testing.kv_format import KVFormatConformance
from engine.testing.quantizer import QuantizerConformance, TileLoaderConformance
from engine.testing.subject import CannotRun, ContractSuite, settable
from engine.testing.suites import suite_of, why
from tests.kernels import tiny
from tests.needs import needs_compiler

BUILT_IN = discover(PluginSettings(third_party=False))


def made(word: str, *overrides: str, **settings: str) -> type:
    words = [f"{key}={value}" for key, value in settings.items()]
    return suite_of(trial_of(find_offer(word, BUILT_IN), ["device=cpu", *overrides], words, []))


@pytest.mark.parametrize(
    ("word", "expected", "other"),
    [
        ("paged", KVAllocatorConformance, PrefixCachingConformance),
        ("prefix_cache", PartialBlockConformance, None),
        ("native", KVFormatConformance, None),
        ("quantizer=none", QuantizerConformance, TileLoaderConformance),
        ("quantizer=int8", QuantizerConformance, TileLoaderConformance),
        ("drafter=none", HostDrafterConformance, DeviceDrafterConformance),
        ("suffix", HostDrafterConformance, DeviceDrafterConformance),
        ("early_exit", DeviceDrafterConformance, HostDrafterConformance),
        ("draft_model", DeviceDrafterConformance, HostDrafterConformance),
        ("torch", AttentionKernelConformance, NativeAttentionConformance),
        ("simulated", CommunicatorConformance, NativeCommunicatorConformance),
        ("local", ContractSuite, None),
        ("llama", ArchitectureConformance, ContractSuite),
    ],
)
def test_the_suite_is_that_of_what_the_plugin_offers(word: str, expected: type, other: type | None) -> None:
    suite = made(word)
    assert issubclass(suite, expected) and (other is None or not issubclass(suite, other))


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """An architecture without a model that it computes, and a slot without a suite."""
    other = tiny.write(tmp_path, architectures=["OtherForCausalLM"])
    suite = made("llama", f"model.path={other}")
    assert issubclass(suite, ContractSuite) and "set model.path=DIR" in suite._note
    assert "no suite" in made("local")._note and "_note" not in settable(suite)


@needs_compiler
def test_what_is_offered_for_another_execution_is_tested_then() -> None:
    assert issubclass(made("cpu"), NativeAttentionConformance)


def test_a_drafter_on_the_device_is_selected_by_the_overrides_of_the_check() -> None:
    assert made("early_exit", "drafter.max_width=2").overrides == (
        "drafter=early_exit", "device=cpu", "drafter.max_width=2",
    )  # fmt: skip


def test_attributes_are_set_as_their_types_want_and_others_are_refused() -> None:
    suite = made("quantizer=int8", weight_error="1", rows="[1,2]", dtypes="[bfloat16]")
    assert (suite.weight_error, suite.rows, suite.dtypes) == (1.0, (1, 2), ("bfloat16",))
    assert {"device", "weight_error"} <= set(settable(suite))
    with pytest.raises(CannotRun, match="expected `float`, got `str`"):
        made("quantizer=int8", weight_error="x")
    with pytest.raises(CannotRun, match="did you mean 'rows'"):
        made("quantizer=int8", row="[1]")


def test_an_allocator_is_built_for_the_block_size_that_the_suite_asks_for() -> None:
    allocator = made("paged")().make(64)
    allocator.start(two_groups(8))
    assert allocator.blocks_needed(None, 128, 128) == (2, 2)


def test_the_reason_of_a_failure_is_one_line_that_says_where() -> None:
    try:
        raise ExceptionGroup("two failures", [ValueError("first\nsecond"), ValueError("other")])
    except ExceptionGroup as error:
        assert why(error) == "ValueError: first"
    try:
        int("x")
    except ValueError as error:
        assert why(error).startswith("ValueError: invalid literal") and "(test_suites.py:" in why(error)
