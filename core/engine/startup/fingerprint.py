"""What must be the same on all ranks, in short."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

import msgspec

from engine import __version__
from engine.assembly.plan import EnginePlan
from engine.step.messages import Versions

MOST_HEADER = 100 * 2**20
"""Bytes of a header of a safetensors file that are looked at."""


def versions() -> Versions:
    """Of this process; torch need not have been loaded."""
    return Versions(engine=__version__, python=platform.python_version(), torch=version("torch"))


def plan_hash(plan: EnginePlan) -> str:
    """Of everything that was decided."""
    return hashlib.sha256(msgspec.json.encode(plan, order="deterministic")).hexdigest()[:16]


def checkpoint_hash(path: str) -> str:
    """Of the model's files: names, sizes, settings and the headers of weights, but no weight; empty where there are
    none."""
    folder, found = Path(path), hashlib.sha256()
    files = sorted(file for file in folder.glob("*") if file.suffix in (".json", ".safetensors"))
    for file in files:
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            if file.suffix == ".safetensors":
                found.update(opened.read(min(int.from_bytes(opened.read(8), "little"), MOST_HEADER)))
            elif file.name == "config.json":
                found.update(opened.read())
    return found.hexdigest()[:16] if files else ""
