"""Messages between the API process and the engine process: msgpack frames over a local socket pair.

A frame is a 4-byte little-endian length and the msgpack body.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.contracts.events import Event
from engine.contracts.request import EngineRequest, FinishReason, TokensOut
from engine.loop.step_errors import StepCostReport
from engine.machine import MachineTimes
from engine.ranks.messages import RankInfo

MAX_FRAME = 256 * 1024 * 1024
"""Bytes; a longer frame means a broken peer and ends the connection."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: EngineRequest
    arrived_s: float | None = None
    """When it reached the engine, on its clock. Set by the engine's inbox; ``None`` until then."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these sequences. ``reason`` becomes their finish reason (``stop``: a stop string was met)."""

    request_ids: tuple[str, ...]
    reason: FinishReason = "abort"


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget cached prefixes that no running request uses."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort what runs and end the process. (Draining is the API's job: it waits before it sends this.)"""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with a :class:`Heartbeat` at once, whatever a step is doing."""


class ReadExpertLoad(msgspec.Struct, frozen=True, tag="read_expert_load"):
    """Answer with an :class:`ExpertLoad`."""


ToEngine = Submit | Abort | ResetPrefixCache | Shutdown | Ping | ReadExpertLoad


class Phase(msgspec.Struct, frozen=True):
    """A part of start-up that took time."""

    name: str
    seconds: float
    held_bytes: int = 0
    """Memory of the engine's device (CPU: resident memory) at its end, above what it was when start-up began."""
    peak_bytes: int = 0
    """The most during the phase, above the same."""


class MemoryLine(msgspec.Struct, frozen=True):
    """One purpose that takes memory, in bytes."""

    name: str
    planned_bytes: int
    """Estimated before loading."""
    measured_bytes: int | None = None
    """``None`` where it cannot be told apart from the rest."""


class MemoryLedger(msgspec.Struct, frozen=True):
    """Where the device's memory goes, in bytes."""

    device: str
    device_bytes: int
    free_bytes: int
    """Free before anything was loaded."""
    fraction: float
    lines: tuple[MemoryLine, ...]
    total_bytes: int
    """Estimated peak with every block of the KV pool written. Less than the sum of the lines: the largest step takes
    the memory that loading needed for a moment."""
    headroom_bytes: int
    """What stays free at that peak."""
    peak_so_far_bytes: int
    """Measured from the beginning of start-up to its end. CPU: libraries loaded meanwhile included, pages of the KV
    pool nobody wrote to not."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What is known once the engine is ready."""

    pid: int
    num_blocks: tuple[int, ...]
    """By KV group."""
    block_size: int
    kv_tokens: int
    """That the KV pool holds."""
    max_len: int
    vocab_size: int
    weights_bytes: int
    kv_bytes: int
    phases: tuple[Phase, ...]
    lowering: tuple[str, ...]
    """Which kernel each kind of operation runs on, one line each."""
    ledger: MemoryLedger | None = None
    notes: tuple[str, ...] = ()
    """What start-up found that the user should know, one line each."""
    ranks: tuple[RankInfo, ...] = ()
    """Where there are several. What is said above is then of rank 0."""
    host: str = ""
    """An address of the machine that ``pid`` is on; empty: the server's."""
    namespace: str = ""
    """Of its records, in hexadecimal: those of two engines are the same only where it is equal. Empty: it has no KV
    stores."""
    identity: str = ""
    """Of what its outputs depend on, in hexadecimal: an engine goes on with another one's output only where it is
    equal."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up is getting on."""

    phase: str
    fraction: float
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class GroupBlocks(msgspec.Struct, frozen=True):
    """KV blocks of a group by state; ``free + cached + leased == total``."""

    group: str
    """``full``, ``window_4096``"""
    total: int
    free: int
    cached: int
    leased: int

    @property
    def used(self) -> float:
        """Leased ones, 0..1."""
        return self.leased / self.total if self.total else 0.0


class StoreState(msgspec.Struct, frozen=True):
    """What a KV store has, and what became of it so far."""

    name: str
    records: int
    num_bytes: int
    most_bytes: int
    evicted: int
    faults: int
    """Records that were damaged, foreign or gone, and reads and writes that failed."""
    loads: int = 0
    """Requests that had tokens from it."""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    """Of the first store: copied to the device; of others: read into memory."""
    stored_bytes: int = 0
    """Of records that it took."""
    load_s: float = 0.0
    """That requests waited for it, in vain as well."""
    saved_s: float = 0.0
    """What computing ``loaded_tokens`` would have taken by the measured cost of steps, less ``load_s``."""
    skipped: dict[str, int] = {}
    """Requests that computed tokens which it had, by reason: :data:`engine.loop.staging.SKIPPED`."""
    unpriced_tokens: int = 0
    """Of ``loaded_tokens``, those that ``saved_s`` leaves out: no step has shown yet what computing them takes."""


class EngineStats(msgspec.Struct, frozen=True):
    """The engine's state at one moment."""

    at_s: float = 0.0
    step: int = 0
    """Steps done so far: moves whenever work is pending, unless the engine is stuck."""
    running: int = 0
    waiting: int = 0
    blocks: tuple[GroupBlocks, ...] = ()
    rows_used: int = 0
    stores: tuple[StoreState, ...] = ()
    """Of slot ``kv_store``, in their order."""
    step_cost: StepCostReport | None = None
    """As of some steps ago."""
    machine: MachineTimes | None = None
    """Of all processes of the engine, the API's among them: read when the state is asked for."""

    @property
    def kv_used(self) -> float:
        """Of the group that has least left."""
        return max((group.used for group in self.blocks), default=0.0)

    @property
    def blocks_leased(self) -> int:
        """Of all groups."""
        return sum(group.leased for group in self.blocks)


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Results of a step, and what happened in it. Also sent while idle when something changed (an abort)."""

    outputs: tuple[TokensOut, ...]
    events: tuple[Event, ...]
    stats: EngineStats


CauseOfDeath = Literal[
    "engine_dead", "engine_stalled", "engine_closed", "rank_failed", "device_failed", "plugin_failed"
]
"""What an engine died of, for programs; ``engine_dead``: its process ended, and more is not known; ``engine_closed``:
it was ended on purpose."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on (or could not start). The process ends after this."""

    error: str
    phase: str = ""
    refused: bool = False
    """The configuration cannot run here, and the error says what to change: trying again is no use."""
    cause: CauseOfDeath = "engine_dead"


class DeviceFailed(msgspec.Struct, frozen=True):
    """Of the engine process to itself: a rank has failed, whether or not a step waits for it."""

    error: str


class Wake(msgspec.Struct, frozen=True):
    """Of the engine process to itself: a store has done something."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The engine process runs; how its step in hand is getting on, by the engine's own clock."""

    step_s: float = 0.0
    """How long the step has taken so far; 0 between steps."""
    expected_s: float = 0.0
    """How long such a step takes, from measured ones; 0 before anything was measured."""


class ExpertLoad(msgspec.Struct, frozen=True, tag="expert_load"):
    """How often experts were chosen since the engine was ready."""

    layers: dict[int, tuple[int, ...]]
    """By layer, how many pairs of a token and an expert went to each expert; empty where nothing is counted."""


FromEngine = Progress | Ready | StepOutputs | Failed | Heartbeat | ExpertLoad
