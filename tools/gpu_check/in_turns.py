"""Workers that compile side by side and measure one after another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

COMPILE_S, MOST_WAIT_S = 70.0, 110.0
"""No alternative is begun after the first; after the second nobody is waited for any more."""


def wait_for_all(ready: Any) -> None:
    """Until every worker has captured, or one has taken too long: then the others measure beside it."""
    with suppress(threading.BrokenBarrierError):
        ready.wait(MOST_WAIT_S)


def captured(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    call()
    if device == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@contextmanager
def suppress_and_say(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}"[:300], file=sys.stderr)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
