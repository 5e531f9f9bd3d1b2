"""Compiled kernels, and what was measured with them, from one start to the next: see ``file_cache.py``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from engine.native import file_cache
from engine.native.compiler import Compiler, Source

LIBRARY, RATES = ".so", ".json"


def build(compiler: Compiler, source: Source, anew: bool = False) -> bytes:
    """The shared library of ``source``: as kept, unless it is to be built ``anew``. Raises :class:`NativeError`."""
    return file_cache.remembered(_library(compiler, source), lambda: compiler.compile(source), anew)


def kept(compiler: Compiler, source: Source) -> bytes | None:
    """The shared library of ``source`` where it is kept."""
    return file_cache.kept(_library(compiler, source))


def _library(compiler: Compiler, source: Source) -> str:
    return f"{source.name}-{compiler.key(source)}{LIBRARY}"


def rates(
    compiler: Compiler, source: Source, names: Sequence[str], measure: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """What ``measure`` says of ``names`` in the library of ``source``: with the same processor, compiler, source and
    names always what was kept first. Without a cache folder each process measures."""
    key = hashlib.sha256("\0".join((compiler.key(source), *names)).encode()).hexdigest()[:32]
    measured: dict[str, float] = json.loads(
        file_cache.remembered(f"{source.name}-{key}{RATES}", lambda: json.dumps(measure()).encode())
    )
    return measured
