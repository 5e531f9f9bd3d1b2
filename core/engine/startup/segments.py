"""Memory that outlives the engines of a server: KV stores keep records there, and read those of the others.

It is a file in memory for each engine, which the server makes and every engine process inherits. It takes what is
written to it, and is gone when the server and its engines are.

Further ranks of an engine open the file, too. Each holds a lock on it for as long as it lives, so that the next engine
does not write to it before they are all gone.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.assembly.plan import EnginePlan
from engine.ranks.messages import OpenMemory

NOEXEC_SEAL = 0x8
"""``MFD_NOEXEC_SEAL``: systems may allow no others."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What one engine is given."""

    files: tuple[int, ...]
    """Descriptors, by number of the engine."""
    own: int
    """The number of the one that this engine writes to."""
    owner: object = None
    """Closes them when nobody has it any more."""

    @property
    def words(self) -> tuple[str, ...]:
        """For the command line of its process."""
        return "--segments", ",".join(map(str, self.files)), "--segment", str(self.own)

    @staticmethod
    def of(files: str | None, own: int | None) -> Segments | None:
        """From there; ``None``: there are none."""
        return None if files is None or own is None else Segments(tuple(map(int, files.split(","))), own)


class ServerMemory:
    """The files of a server, for as long as this object lives."""

    def __init__(self, plan: EnginePlan) -> None:
        """None where no store keeps records, and where engines or ranks of one are on other machines: their memory is
        their own, and ends with them."""
        shares = bool(plan.slots.get("kv_store")) and plan.launcher is None and plan.parallelism.nodes == 1
        self._files = tuple([_file(number) for number in range(plan.settings.fleet.replicas if shares else 0)])
        weakref.finalize(self, _close, self._files)

    def of(self, engine: int) -> Segments | None:
        """``engine``: its number, from 0 on."""
        return Segments(self._files, engine, self) if self._files else None


def _file(number: int) -> int:
    name, flags = f"engine-kv-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        file = os.memfd_create(name, flags | NOEXEC_SEAL)
    except OSError:  # Linux before 6.3
        file = os.memfd_create(name, flags)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # a reader's memory does not go away
    return file


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def of_all_ranks(file: int, seconds: float) -> OpenMemory | None:
    """What further ranks need to open a file. ``None``: after so many seconds those of an earlier engine may still
    write to it."""
    path, ends = f"/proc/{os.getpid()}/fd/{file}", time.monotonic() + seconds
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return OpenMemory(path, _identity(own))
            except BlockingIOError:
                if time.monotonic() >= ends:
                    return None
                time.sleep(0.02)
    finally:
        os.close(own)


def opened(opening: OpenMemory) -> int:
    """A descriptor for a further rank, which holds the file as long as it is open. Raises ``OSError`` where it is
    another machine, or cannot see the process of rank 0."""
    try:
        file = os.open(opening.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _identity(file) != opening.identity:
                raise OSError("it is another file there")
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        raise OSError(f"{opening.path} cannot be opened as memory of rank 0: {error}") from error
    return file


def _identity(file: int) -> tuple[str, int, int]:
    status = os.fstat(file)
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), status.st_dev, status.st_ino
