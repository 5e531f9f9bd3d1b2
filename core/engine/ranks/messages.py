"""Messages between the engine process, which drives, and the workers of further ranks.

In order: :class:`Hello`, :class:`Assignment`, :class:`Present`, :class:`Begin`, :class:`Loaded`, :class:`Allocate`,
:class:`Built`; then :class:`Run` and, of the rank that chooses tokens, :class:`Result`. Where keys and values are kept
beyond the device, :class:`OpenMemory` and :class:`Opened` where ranks are on one machine, :class:`KeepRecords` once,
then :class:`Store` and :class:`Stored`. From its beginning a worker sends a :class:`Beat` twice a second.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.step.plan import RecordMove, StepPlan, StepResult

MAX_FRAME = 256 * 1024 * 1024
"""Bytes."""
BEAT_S = 0.5
"""Between two beats."""


class Versions(msgspec.Struct, frozen=True):
    """What must be the same on all ranks."""

    engine: str
    python: str
    torch: str
    source: Mapping[str, str] = {}
    """Of the core: see :func:`engine.startup.fingerprint.code_digests`."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker is there; it knows nothing yet."""

    versions: Versions
    host: str
    pid: int
    cuda_devices: int
    """That it sees."""
    cores: int
    """That it may run on."""


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """Which rank of which plan the worker is."""

    rank: int
    plan: bytes
    """JSON."""
    threads: int
    host: str
    """An address of the worker's machine that other ranks reach."""


class Present(msgspec.Struct, frozen=True, tag="present"):
    """What the worker made of it."""

    plan_hash: str
    checkpoint_hash: str
    """Of the files in ``model.path``: see :func:`engine.startup.fingerprint.checkpoint_hash`."""
    plugins: Mapping[str, str]
    """Their source: see :func:`engine.startup.fingerprint.plugin_digests`."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Everything fits together: build the plugins."""


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """The plugins are built, and there is memory: from here on ranks wait for each other."""


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """All ranks are bound: meet them, and load."""

    invitation: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The weights are in place."""

    num_blocks: int
    """KV blocks that this rank has memory for."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """So many blocks, as many as on every other rank."""

    num_blocks: int


class RankInfo(msgspec.Struct, frozen=True):
    """A rank of an engine that is ready."""

    rank: int
    place: str
    """Where it runs: ``pid 4711``"""
    holds: str
    """Of the model."""
    weights_bytes: int
    kv_bytes: int
    num_blocks: int
    """KV blocks that there is memory for."""


class Built(msgspec.Struct, frozen=True, tag="built"):
    """Plans may come."""

    info: RankInfo
    notes: tuple[str, ...]


class Run(msgspec.Struct, frozen=True, tag="run"):
    plan: StepPlan


class Result(msgspec.Struct, frozen=True, tag="result"):
    result: StepResult


class OpenMemory(msgspec.Struct, frozen=True, tag="open_memory"):
    """Open the memory that rank 0 has for records of all ranks. It is answered by an :class:`Opened`."""

    path: str
    identity: tuple[str, int, int]
    """Of its machine since that was started, its device and inode: what is found there is to be this file."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    problem: str
    """Why it cannot be; empty: it is open."""


class KeepRecords(msgspec.Struct, frozen=True, tag="keep_records"):
    """Make memory for this rank's parts of records, or map what was opened."""

    num_slots: tuple[int, ...]
    """By KV group."""
    offsets: tuple[int, ...] = ()
    """By KV group: where slots begin in what was opened, in bytes; empty: this rank makes memory."""
    parts: tuple[tuple[int, int, int], ...] = ()
    """By KV group: what of them is this rank's. See :class:`engine.kv.records.Part`."""


class Store(msgspec.Struct, frozen=True, tag="store"):
    """Copy committed blocks to slots, once the plans before are done."""

    number: int
    moves: tuple[RecordMove, ...]


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """This rank's part of a :class:`Store` is done."""

    number: int
    well: bool


class Where(msgspec.Struct, frozen=True):
    """How far a rank is."""

    doing: str = ""
    """During start-up."""
    plan: int = -1
    """The newest one it has begun."""
    call: int = 0
    """The last call of its communicator in this plan, from 1 on; 0: none yet."""
    working: bool = False
    """The plan is not done."""

    def __str__(self) -> str:
        if self.doing:
            return f"starting ({self.doing})"
        if self.plan < 0:
            return "waiting for the first plan"
        if not self.working:
            return f"done with plan {self.plan}"
        return f"in call {self.call} of plan {self.plan}" if self.call else f"in plan {self.plan}"


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    where: Where


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The worker cannot go on, and ends."""

    error: str
    where: Where
    refused: bool = False
    """The configuration cannot run there."""
    waited: bool = False
    """For another rank, in vain: this one is not to blame."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Give everything back and end."""

    why: str = ""
    """The engine cannot run with what is configured or installed; empty: it was shut down."""


ToWorker = Assignment | Begin | Meet | Allocate | Run | OpenMemory | KeepRecords | Store | End
FromWorker = Hello | Present | Bound | Loaded | Built | Opened | Result | Stored | Beat | Broken
