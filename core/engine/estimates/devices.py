"""Devices, as their data sheets describe them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.estimates.errors import EstimateError

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


DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB", 80 * GIB, 2039 * GB, 312 * TERA, 300 * GB, "NVIDIA A100 80GB SXM data sheet, NVLink 3"),
        Device("H100", 80 * GIB, 3350 * GB, 989 * TERA, 450 * GB, "NVIDIA H100 SXM data sheet, NVLink 4"),
        Device("H200", 141 * GB, 4800 * GB, 989 * TERA, 450 * GB, "NVIDIA H200 SXM data sheet, NVLink 4"),
    )
}
"""By name. Cards on an NVLink switch."""


def device(name: str) -> Device:
    """One of :data:`DEVICES`, in upper or lower case. Raises :class:`EstimateError` for another."""
    found = {key.lower(): known for key, known in DEVICES.items()}.get(name.lower())
    if found is None:
        raise EstimateError(f"device {name!r} is unknown: expected one of {', '.join(DEVICES)}, or a description of it")
    return found
