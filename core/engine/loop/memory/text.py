"""Bytes for people."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """``1.25 GiB``, ``310.4 MiB`` or ``12.0 KiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}" if name == "GiB" else f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"
