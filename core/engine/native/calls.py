"""Calls of native functions as data: made at once, or many of them by one call into C.

What Python adds to a call, some ten microseconds with the tensors it allocates, is then paid once and not in every
step: a decode step of a small model is hundreds of calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.native.compiler import Source
from engine.native.shared_library import open_library

SOURCE = Source(Path(__file__).with_suffix(".cpp"))
MOST_ARGUMENTS = 10
"""As in ``calls.cpp``."""


class Function:
    """A function of a kernel library that returns nothing."""

    __slots__ = ("_call", "address", "name")

    def __init__(self, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        function.argtypes, function.restype = arguments, None
        self.name = name
        self.address = ctypes.cast(function, ctypes.c_void_p).value
        self._call: Callable[..., None] = function

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def at(self, *arguments: int | None, moves: tuple[int, int, int] | None = None) -> NativeCall:
        """The call with these arguments, not made yet. ``moves``: see :class:`NativeCall`."""
        return NativeCall(self, arguments, moves)


@dataclass(frozen=True, slots=True)
class NativeCall:
    """One call, with integers and pointers. Whoever keeps it keeps the memory it points at."""

    function: Function
    arguments: tuple[int | None, ...]
    moves: tuple[int, int, int] | None = None
    """Of a linear layer that may be called for other rows, as far apart, by several threads at once: which arguments
    are the number of rows, the address of ``x`` and that of ``y``."""

    def __call__(self) -> None:
        """Make it."""
        self.function(*self.arguments)


class _Call(ctypes.Structure):
    """``Call`` of ``calls.cpp``."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_int64 * MOST_ARGUMENTS))


def in_one(calls: Sequence[NativeCall]) -> Callable[[], None]:
    """What makes all calls in this order, by one call into C that releases the GIL.

    Raises ``ValueError`` for a call with a float or with more than :data:`MOST_ARGUMENTS` arguments,
    :class:`engine.native.NativeError`.
    """
    array = table(calls)
    make, first, count = _make_calls(), ctypes.addressof(array), len(array)

    def run(held: Any = array) -> None:
        make(first, count)

    return run


def table(calls: Sequence[NativeCall]) -> Any:
    """The calls as an array of ``Call`` of ``calls.cpp``, for native code that makes some of them. Raises as
    :func:`in_one`."""
    return (_Call * len(calls))(*map(_entry, calls))


def _entry(call: NativeCall) -> _Call:
    name, arguments = call.function.name, call.arguments
    if len(arguments) > MOST_ARGUMENTS:
        raise ValueError(f"{name} takes {len(arguments)} arguments, expected at most {MOST_ARGUMENTS}")
    if not all(argument is None or isinstance(argument, int) for argument in arguments):
        raise ValueError(f"{name} takes arguments that are neither integers nor pointers")
    return _Call(call.function.address, (ctypes.c_int64 * MOST_ARGUMENTS)(*(argument or 0 for argument in arguments)))


@cache
def _make_calls() -> Any:
    function = open_library(SOURCE).make_calls
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), None
    return function
