"""Calls of native functions, noted once and then made again by one call into C.

What Python adds to a call, some ten microseconds with the tensors it allocates, is then paid once and not in every
step: a decode step of a small model is hundreds of calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

MOST_ARGUMENTS = 10
"""As in ``replay.cpp``."""


class _Call(ctypes.Structure):
    """``Call`` of ``replay.cpp``."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_int64 * MOST_ARGUMENTS))


class Function:
    """A function of a kernel library that returns nothing. Calls are made, and noted where a recording is open."""

    __slots__ = ("_call", "address", "name")

    def __init__(self, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        function.argtypes, function.restype = arguments, None
        self.name = name
        self.address = ctypes.cast(function, ctypes.c_void_p).value
        self._call: Callable[..., None] = function

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)
        recording = _OPEN.get()
        if recording is not None:
            recording.add(self, arguments)


class Recording:
    """The calls made while it was open (:func:`recording`), in this thread."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.reason: str | None = None
        """Why the calls cannot be made again; ``None``: they can."""

    def add(self, function: Function, arguments: tuple[Any, ...]) -> None:
        """Note a call. Its pointers must stay valid for as long as it may be made again."""
        if len(arguments) > MOST_ARGUMENTS:
            self.reason = f"{function.name} takes {len(arguments)} arguments, at most {MOST_ARGUMENTS} are recorded"
        elif not all(argument is None or isinstance(argument, int) for argument in arguments):
            self.reason = f"{function.name} takes arguments that are neither integers nor pointers"
        else:
            padded = [int(argument or 0) for argument in arguments] + [0] * (MOST_ARGUMENTS - len(arguments))
            self.calls.append(_Call(function.address, (ctypes.c_int64 * MOST_ARGUMENTS)(*padded)))

    def replay(self) -> Callable[[], None]:
        """What makes all calls again, in this order; it keeps nothing alive that they point at.

        Raises ``ValueError`` if there is a reason why not, :class:`engine.native.NativeError`.
        """
        if self.reason is not None:
            raise ValueError(f"these calls cannot be made again: {self.reason}")
        calls = (_Call * len(self.calls))(*self.calls)
        run, first, count = _replay(), ctypes.addressof(calls), len(calls)

        def replay(held: Any = calls) -> None:
            run(first, count)

        return replay


_OPEN: ContextVar[Recording | None] = ContextVar("open native recording", default=None)
_made = 0


def recordings_made() -> int:
    """How many have been opened in this process."""
    return _made


@contextmanager
def recording() -> Iterator[Recording]:
    """Open a recording for the calls of this thread."""
    global _made
    _made += 1
    opened = Recording()
    token = _OPEN.set(opened)
    try:
        yield opened
    finally:
        _OPEN.reset(token)


@cache
def _replay() -> Any:
    from engine.native.loader import open_library

    function = open_library(Path(__file__).with_name("replay.cpp")).replay
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), None
    return function
