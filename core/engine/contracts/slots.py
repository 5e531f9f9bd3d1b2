"""The table of slots: each slot is declared here and nowhere else.

Discovery, composing, binding, ``engine plugins`` and the reference read this table. A new slot is an entry here, a file
beside this one with its Protocol, and a suite in :mod:`engine.testing`; :mod:`engine.hookspecs` documents its hook.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.contracts.architecture import Architecture, NestedArchitecture
from engine.contracts.attention_kernel import AttentionKernel, LogSumExpAttention, NativeAttention
from engine.contracts.communicator import Communicator, NativeCommunicator
from engine.contracts.config import (
    CommunicatorConfig,
    ConstraintConfig,
    DrafterConfig,
    KVAllocatorConfig,
    ParallelismConfig,
    QuantizerConfig,
    SchedulerConfig,
    SlotConfig,
)
from engine.contracts.constraint import Constraint
from engine.contracts.drafter import CapturableDrafter, DeviceDrafter, Drafter, HostDrafter
from engine.contracts.embedder import Embedder
from engine.contracts.exporter import CountersExporter, Exporter, ScrapedExporter, TranscriptExporter
from engine.contracts.kv_allocator import FillingAllocator, KVAllocator
from engine.contracts.kv_format import KVFormat
from engine.contracts.kv_store import (
    KVStore,
    LendingStore,
    MemoryStore,
    RetainingStagedStore,
    RetainingStore,
    SharedStore,
    StagedStore,
)
from engine.contracts.parallelism import EngineLauncher, Launcher
from engine.contracts.quantizer import (
    CheckingQuantizer,
    KeepingQuantizer,
    KVScaleReader,
    Quantizer,
    UnpackingQuantizer,
)
from engine.contracts.router import AnswerStore, ModelChooser, Router, RouterTold
from engine.contracts.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Slot:
    """One question that the engine asks a plugin."""

    name: str
    protocol: type[Any]
    """What a plugin must look like."""
    optional: tuple[type[Any], ...] = ()
    """Protocols that a plugin may fulfil besides."""
    config: type[SlotConfig] = SlotConfig
    """The base that a plugin's config dataclass derives from."""
    suite: str = ""
    """``package.module:function``, called with a :class:`engine.testing.subject.Subject`: makes the test class of a
    plugin. Empty: only what is built is compared with ``protocol``."""
    in_api: bool = False
    """Whether plugins live in the API process; otherwise in the engine process."""
    many: bool = False
    """Whether any number of plugins answers; otherwise exactly one."""

    @property
    def hook(self) -> str:
        """The function by which a package offers plugins."""
        return f"engine_{self.name}"


SLOTS: dict[str, Slot] = {
    slot.name: slot
    for slot in (
        Slot(
            "architecture",
            Architecture,
            (NestedArchitecture,),
            suite="engine.testing.architecture:suite_for",
        ),
        Slot("parallelism", Launcher, (EngineLauncher,), config=ParallelismConfig),
        Slot(
            "communicator",
            Communicator,
            (NativeCommunicator,),
            config=CommunicatorConfig,
            suite="engine.testing.communicator:suite_for",
        ),
        Slot(
            "quantizer",
            Quantizer,
            (KeepingQuantizer, CheckingQuantizer, UnpackingQuantizer, KVScaleReader),
            config=QuantizerConfig,
            suite="engine.testing.quantizer:suite_for",
        ),
        Slot("kv_format", KVFormat, suite="engine.testing.kv_format:suite_for"),
        Slot(
            "kv_allocator",
            KVAllocator,
            (FillingAllocator,),
            config=KVAllocatorConfig,
            suite="engine.testing.kv_allocator:suite_for",
        ),
        Slot(
            "kv_store",
            KVStore,
            (MemoryStore, RetainingStore, SharedStore, StagedStore, RetainingStagedStore, LendingStore),
            suite="engine.testing.kv_store:suite_for",
            many=True,
        ),
        Slot(
            "attention_kernel",
            AttentionKernel,
            (NativeAttention, LogSumExpAttention),
            suite="engine.testing.attention_kernel:suite_for",
        ),
        Slot(
            "drafter",
            Drafter,
            (HostDrafter, DeviceDrafter, CapturableDrafter),
            config=DrafterConfig,
            suite="engine.testing.drafter:suite_for",
        ),
        Slot("scheduler", Scheduler, config=SchedulerConfig, suite="engine.testing.scheduler:suite_for"),
        Slot(
            "constraint",
            Constraint,
            config=ConstraintConfig,
            suite="engine.testing.constraint:suite_for",
        ),
        Slot("embedder", Embedder, suite="engine.testing.embedder:suite_for", in_api=True),
        Slot(
            "router",
            Router,
            (RouterTold, ModelChooser, AnswerStore),
            suite="engine.testing.router:suite_for",
            in_api=True,
        ),
        Slot(
            "exporter",
            Exporter,
            (ScrapedExporter, CountersExporter, TranscriptExporter),
            suite="engine.testing.exporter:suite_for",
            in_api=True,
            many=True,
        ),
    )
}
"""By name, in the order in which the core builds plugins."""
