"""Libraries that will be needed, compiled before they are asked for: all at once, while the process does other things.

Nothing is loaded here: what is loaded before torch would bring an OpenMP library of its own. Nothing fails here,
either: who asks for a library that could not be built is told why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine.native import library_cache
from engine.native.compiler import Compiler, Source, find_compiler

_begun: dict[tuple[Compiler, Source], Future[bytes]] = {}
_taken: set[tuple[Compiler, Source]] = set()
"""A process loads a library once."""
_beginning = threading.Lock()


def begin(sources: Iterable[Source]) -> None:
    """Compile those that are not kept from earlier starts, in threads, as many at a time as there are cores."""
    sources = dict.fromkeys(sources)
    compiler = find_compiler() if sources else ""
    if not isinstance(compiler, Compiler):
        return
    with _beginning:
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compiler")
        for source in sources:
            key = compiler, source
            if key in _begun or key in _taken:
                continue
            kept = library_cache.kept(compiler, source)
            if kept is None:
                _begun[key] = pool.submit(library_cache.build, compiler, source)
            else:
                _begun[key] = Future()
                _begun[key].set_result(kept)
        pool.shutdown(wait=False)


def unfinished() -> int:
    """How many are being compiled, or wait for a core."""
    return sum(not future.done() for future in tuple(_begun.values()))


def finish() -> None:
    """Wait for all that was begun."""
    wait(tuple(_begun.values()))


def take(compiler: Compiler, source: Source) -> bytes | None:
    """The library, if it was begun and not taken before. Raises :class:`~engine.native.compiler.NativeError`."""
    _taken.add((compiler, source))
    begun = _begun.pop((compiler, source), None)
    return None if begun is None else begun.result()
