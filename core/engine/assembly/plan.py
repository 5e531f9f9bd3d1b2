"""The engine plan: everything that was decided at assembly, as plain data.

The API process resolves a plan; engine and worker processes receive it as JSON and bind it. It is printed at
start-up and served at ``/engine/plan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from engine.assembly import values
from engine.contracts.config import (
    ConstraintConfig,
    DrafterConfig,
    KVAllocatorConfig,
    ParallelismConfig,
    QuantizerConfig,
    SchedulerConfig,
    Settings,
)
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.models.layout import Layout

T = TypeVar("T")
PLAN_VERSION = 1
CALL_SHARE = 0.7
STALL_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The plugin chosen for a slot, and why."""

    slot: str
    name: str
    factory: str
    """``package.module:attribute``"""
    config_class: str
    """``package.module:Class`` of the config dataclass."""
    config: dict[str, Any]
    origin: str
    """Distribution and version the plugin comes from, for example ``engine 0.1.0``."""
    requested: str
    """What the configuration said: this plugin's name, or ``auto``."""
    passed_over: tuple[str, ...] = ()
    """For ``auto``: the earlier candidates and why each was not taken, one line each."""
    sources: str = ""
    """``package.module:function`` that names its C++; see :class:`engine.contracts.provider.Provider`."""

    @property
    def who(self) -> str:
        """The plugin in messages: ``quantizer=mine (from engine-mine 0.3.0)``."""
        return f"{self.slot}={self.name} (from {self.origin})"


def config_of(choice: SlotChoice) -> Any:
    """The plugin's config dataclass with the plan's values."""
    return values.build(values.load(choice.config_class), dict(choice.config))


@dataclass(frozen=True)
class EnginePlan:
    """A resolved, serialisable engine."""

    version: int
    engine_version: str
    model: ModelFacts
    device: DeviceFacts
    dtype: str
    max_len: int
    execution: str
    """Resolved: ``eager``, ``compile`` or ``graphs``."""
    overlap: bool
    settings: Settings
    slots: dict[str, tuple[SlotChoice, ...]]
    """By slot; exactly one choice except for ``exporter``."""
    notes: tuple[str, ...] = ()
    """What the user should know, one line each (for example: a host drafter makes steps wait)."""
    expert_load: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """What ``parallelism.expert_load`` said: numbers of layers, each with how often each of its experts was chosen."""
    memory_bytes: int | None = None
    """Bytes of its device that each rank may count as free, as measured before the first of several engines started;
    ``None``: as much as is free when it starts, shared with the ranks beside it."""
    launcher: SlotChoice | None = None
    """Who starts the engines, each on a machine that it finds; ``None``: the server does, on its own."""

    # Settings of plugins, as far as the core reads them.

    @cached_property
    def parallelism(self) -> ParallelismConfig:
        return self._config("parallelism", ParallelismConfig)

    @cached_property
    def quantizer(self) -> QuantizerConfig:
        return self._config("quantizer", QuantizerConfig)

    @cached_property
    def kv_allocator(self) -> KVAllocatorConfig:
        return self._config("kv_allocator", KVAllocatorConfig)

    @cached_property
    def drafter(self) -> DrafterConfig:
        return self._config("drafter", DrafterConfig)

    @cached_property
    def constraint(self) -> ConstraintConfig:
        return self._config("constraint", ConstraintConfig)

    @cached_property
    def scheduler(self) -> SchedulerConfig:
        return self._config("scheduler", SchedulerConfig)

    def _config(self, slot: str, base: type[T]) -> T:
        config = config_of(self.choice(slot))
        assert isinstance(config, base)
        return config

    @cached_property
    def layout(self) -> Layout:
        """Who works with whom."""
        ranks = self.parallelism
        return Layout(ranks.tp, ranks.pp, ranks.ep, ranks.dcp, ranks.pcp)

    @property
    def block_size(self) -> int:
        """Tokens of a block that the allocator hands out: ``kv_allocator.block_size`` of them on each rank that caches
        other tokens of it."""
        return self.kv_allocator.block_size * self.layout.dcp

    @property
    def in_flight(self) -> int:
        """Steps in flight at once: one for each pipeline stage, and with overlap one that is planned meanwhile."""
        return self.layout.pp + int(self.overlap)

    @property
    def ranks_per_node(self) -> int:
        return self.layout.size // self.parallelism.nodes

    @property
    def ranks_here(self) -> int:
        """Ranks of the machine of an engine: those of all engines of the fleet, where these are on one."""
        return self.ranks_per_node * (self.settings.fleet.replicas if self.launcher is None else 1)

    @property
    def ranks_per_device(self) -> int:
        """That share the memory of one: on CPUs all of a machine, on GPUs one, unless they are to share."""
        return -(-self.ranks_here // (1 if self.device.kind == "cpu" else self.device.count))

    @property
    def timeout_s(self) -> float:
        """See ``parallelism.timeout_s``."""
        return self.parallelism.timeout_s

    @property
    def call_timeout_s(self) -> float:
        """Of one call of a communicator, or without any progress of the ranks: what is left is for telling."""
        return CALL_SHARE * self.timeout_s

    @property
    def stall_s(self) -> float:
        """How long an engine that serves may hang. With several ranks it finds out by itself in less, unless it is
        the engine process that has stopped."""
        stall_s = self.settings.server.stall_s
        return stall_s if self.layout.size == 1 else min(stall_s, STALL_SHARE * self.timeout_s)

    def choice(self, slot: str) -> SlotChoice:
        """The one plugin of a slot that takes exactly one."""
        (only,) = self.slots[slot]
        return only

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> EnginePlan:
        """Raises ``msgspec.ValidationError`` if the data is not a plan of this version."""
        plan = msgspec.json.decode(data, type=EnginePlan)
        if plan.version != PLAN_VERSION:
            raise msgspec.ValidationError(f"plan version {plan.version}, expected {PLAN_VERSION}")
        return plan
