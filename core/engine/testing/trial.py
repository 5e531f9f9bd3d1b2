"""What ``engine plugins check`` asks of the process that runs a suite, and what that process tells, line by line.

A plugin may do anything, to its process as well; so the suite runs in one of its own (:mod:`engine.testing.suites`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.contracts.model import DeviceFacts, ModelConfig


class Trial(msgspec.Struct, frozen=True):
    """A plugin, and how its suite is to run."""

    slot: str
    name: str
    factory: str
    """``package.module:attribute``"""
    config_class: str
    """``package.module:Class``"""
    config: dict[str, Any]
    provides: tuple[str, ...]
    device: DeviceFacts
    suite: str = ""
    """``package.module:Class``: the plugin's own suite; empty: one is made of its slot's."""
    settings: dict[str, str] = {}
    """Attributes of the suite, as they were typed."""
    selected_by: tuple[str, ...] = ()
    """Overrides that select the plugin with this configuration, for suites that run whole engines."""
    dtype: str = "float32"
    """Compute dtype of what factories are told."""
    execution: str = "eager"
    """How steps run, of what factories are told."""
    model: ModelConfig | None = None
    """One that the plugin can compute, where its suite needs one."""


class SuiteFound(msgspec.Struct, frozen=True, tag="suite"):
    """What runs: the first line."""

    suites: tuple[str, ...]
    """Classes whose tests run."""
    settings: dict[str, str]
    """Attributes that may be set, and their values."""
    note: str = ""
    """What these tests leave out."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The first line instead: what was asked for cannot run."""

    problem: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A test begins."""

    test: str


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """A test has ended."""

    test: str
    outcome: Literal["passed", "failed", "skipped"]
    why: str = ""
    """First line of the reason, where it did not pass."""
    details: str = ""
    """All that pytest says about it."""
    seconds: float = 0.0


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last line: every test has run."""


Line = SuiteFound | Refused | Started | Outcome | Ended
