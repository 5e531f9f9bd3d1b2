"""Memory that outlives the engines of a server: KV stores keep records there, and read those of the others.

It is a file in memory for each engine, which the server makes and every engine process inherits. It takes what is
written to it, and is gone when the server and its engines are.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from engine.assembly.plan import EnginePlan

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
        """None where no store keeps records, where engines are on other machines, and where an engine has several
        ranks: the memory of each is its own, and ends with it."""
        shares = bool(plan.slots.get("kv_store")) and plan.launcher is None and plan.layout.size == 1
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
