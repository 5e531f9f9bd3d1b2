"""What must be the same on all ranks, in short."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from engine.assembly.bind import ENGINE_SLOTS
from engine.assembly.plan import EnginePlan
from engine.ranks.messages import Versions
from engine.version import VERSION

CORE = "engine"
CODE = (".py", ".cpp", ".h")
"""Endings of files with code; kernels are compiled of such on each machine."""
MOST_NAMED = 4
"""Parts that differ, in a message."""

MOST_HEADER = 100 * 2**20
"""Bytes of a header of a safetensors file that are looked at."""


def versions() -> Versions:
    """Of this process; torch need not have been loaded."""
    own = {"engine": VERSION, "python": platform.python_version(), "torch": version("torch")}
    return Versions(**own, source=code_digests(CORE))


@cache
def code_digests(package: str) -> Mapping[str, str]:
    """Of the source of a top-level package, by its parts, as this process found it first: the same wherever it is
    installed. Empty for one that is not."""
    found: dict[str, hashlib._Hash] = {}
    for folder, file in _code(package):
        path = file.relative_to(folder)
        part = found.setdefault(".".join((package, *path.parts[:-1][:1])), hashlib.sha256())
        content = file.read_bytes()
        part.update(f"{path.as_posix()} {len(content)}\n".encode() + content)
    return {part: digest.hexdigest()[:8] for part, digest in found.items()}


def plugin_digests(plan: EnginePlan) -> Mapping[str, str]:
    """As :func:`code_digests`, of all packages that the engine's plugins of this plan come from."""
    chosen = [choice for slot in ENGINE_SLOTS for choice in plan.slots[slot]]
    named = {re.split("[.:]", path)[0] for choice in chosen for path in (choice.factory, choice.config_class)}
    return {part: digest for package in sorted(named - {CORE}) for part, digest in code_digests(package).items()}


def other_source(ours: Mapping[str, str], theirs: Mapping[str, str], own: str = "rank 0") -> str:
    """Which parts are not the same, with both digests, in words; empty: none. ``own``: whose ``ours`` is."""
    parts = [part for part in sorted({*ours, *theirs}) if ours.get(part) != theirs.get(part)]
    named = [f"{part} ({theirs.get(part, 'none')}, {own}: {ours.get(part, 'none')})" for part in parts[:MOST_NAMED]]
    named += [f"{len(parts) - MOST_NAMED} other parts"] * (len(parts) > MOST_NAMED)
    return " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))


def _code(package: str) -> Iterator[tuple[Path, Path]]:
    """Files with code, each with the folder that its path counts from."""
    try:
        spec = find_spec(package)
    except ValueError:  # the program itself
        spec = None
    if spec is None:
        return
    for name in spec.submodule_search_locations or ():
        folder = Path(name)
        yield from ((folder, file) for file in sorted(folder.rglob("*")) if file.suffix in CODE)
    if not spec.submodule_search_locations and spec.has_location and spec.origin is not None:
        yield Path(spec.origin).parent, Path(spec.origin)


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
