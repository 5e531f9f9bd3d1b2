"""Devices, as their data sheets describe them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.estimates.errors import EstimateError
from engine.estimates.reading import read

GB, GIB, TERA = 10**9, 2**30, 10**12


@dataclass(frozen=True, slots=True)
class Device:
    """One of several alike that are linked with each other."""

    name: str
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes/s at which memory is read."""
    flops: float
    """FLOP/s of dense products in 16 bits."""
    link: float
    """Bytes/s to the others, in one direction."""
    source: str

    def __post_init__(self) -> None:
        for key in ("memory", "bandwidth", "flops", "link"):
            if not getattr(self, key) > 0:
                raise EstimateError(f"device {self.name}: {key} {getattr(self, key)}, expected a positive number")


_SXM = "NVIDIA's data sheet of the SXM card; memory as drivers report it"
DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB", 79 * GIB, 2039 * GB, 312 * TERA, 300 * GB, _SXM),
        Device("H100", 79 * GIB, 3350 * GB, 989 * TERA, 450 * GB, _SXM),
        Device("H200", 139 * GIB, 4800 * GB, 989 * TERA, 450 * GB, _SXM),
    )
}
"""By name: cards that an NVLink switch joins."""


def device(name: str) -> Device:
    """One of :data:`DEVICES`, in upper or lower case. Raises :class:`EstimateError` for another."""
    found = {key.lower(): known for key, known in DEVICES.items()}.get(name.lower())
    if found is None:
        raise EstimateError(f"device {name!r} is unknown: expected one of {', '.join(DEVICES)}, or a file that says it")
    return found


def device_from(values: object) -> Device:
    """As read from JSON: an object with the fields of :class:`Device`, of one rank where several share a device. Raises
    :class:`EstimateError`."""
    return read(Device, values, "device")
