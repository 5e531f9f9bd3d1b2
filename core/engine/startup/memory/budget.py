"""How much memory is free on a device, and how much of it this process has taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.assembly.errors import AssemblyError
from engine.contracts.model import DeviceFacts

CGROUP = Path("/sys/fs/cgroup")


class DoesNotFit(AssemblyError):
    """The model or its cache does not fit this device."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem])


@dataclass(frozen=True, slots=True)
class Budget:
    """What the engine may take of its device's memory, in bytes."""

    free: int
    """Bytes free on the device before anything was loaded."""
    fraction: float
    """``memory.fraction``"""

    @property
    def usable(self) -> int:
        return int(self.free * self.fraction)

    @property
    def headroom(self) -> int:
        """Bytes left to others."""
        return self.free - self.usable


def free_memory(device: DeviceFacts) -> int:
    """Bytes free on the device now. On a CPU: available without swapping, within the container's limit.

    Raises :class:`DoesNotFit` where the system does not say.
    """
    if device.kind == "cuda":
        import torch  # not where memory is free for a CPU: the API process asks for that, too

        free, _ = torch.cuda.mem_get_info()
        return int(free)
    available = _field(Path("/proc/meminfo"), "MemAvailable:")
    if available is None:
        raise DoesNotFit("/proc/meminfo has no MemAvailable line, so nothing tells how much memory is free")
    return min(available * 1024, device.memory_bytes, _free_in_container(CGROUP, device.memory_bytes))


def _free_in_container(folder: Path, otherwise: int) -> int:
    """Bytes up to the limit of the control group (v2); file pages that can be dropped count as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if not limit.isdigit():
            return otherwise
        used = int((folder / "memory.current").read_text())
        droppable = _field(folder / "memory.stat", "inactive_file") or 0
    except OSError:
        return otherwise
    return max(0, int(limit) - max(0, used - droppable))


def _field(file: Path, name: str) -> int | None:
    """The number after ``name`` in a file of ``name value`` lines."""
    with file.open() as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1])
    return None


class Meter:
    """Memory of this process on a device, in bytes.

    CUDA: what torch's allocator has reserved; the driver's own context comes on top. CPU: resident memory, Python and
    libraries included, so only differences mean something; pages of the KV pool that nobody wrote to are not resident.
    """

    def __init__(self, device_kind: str) -> None:
        self._cuda: Any = None
        if device_kind == "cuda":
            import torch

            self._cuda = torch.cuda
            self._cuda.init()
        self.start = self.used()

    def used(self) -> int:
        """Now."""
        return int(self._cuda.memory_reserved()) if self._cuda else self._status("VmRSS:")

    def peak(self) -> int:
        """The most since :meth:`reset_peak`."""
        return int(self._cuda.max_memory_reserved()) if self._cuda else self._status("VmHWM:")

    def reset_peak(self) -> bool:
        """Forget the peak so far. False where the system does not let a process do so: the peak is then the most
        since the process began."""
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    @staticmethod
    def _status(name: str) -> int:
        return (_field(Path("/proc/self/status"), name) or 0) * 1024
