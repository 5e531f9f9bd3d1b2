"""Load a kernel source as a ctypes library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.native import library_cache
from engine.native.calls import Function
from engine.native.compiler import Source
from engine.native.shared_library import compiler_for, open_library

if TYPE_CHECKING:
    from torch import Tensor

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
"""Types of arguments."""
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
"""``Activation`` of ``activations.h``, by the names of :data:`~engine.contracts.ops.Act`."""


def load(file: Path, functions: Mapping[str, tuple[Any, ...]], macros: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of a ``.cpp`` file, compiled now unless an earlier process did. Raises :class:`NativeError`.

    ``macros``: ``NAME=VALUE`` each, to compile it with; ``functions``: argument types of the functions that are called
    and return nothing (:class:`~engine.native.calls.Function`). Others take nothing and return an ``int``. Import torch
    first: its OpenMP library is then the one that says how many threads there are. A call releases the GIL.
    """
    library = open_library(Source(file, macros))
    for name, arguments in functions.items():
        setattr(library, name, Function(name, library[name], arguments))
    return library


def rates(
    file: Path, names: Sequence[str], measure: Callable[[], dict[str, float]], macros: tuple[str, ...] = ()
) -> dict[str, float]:
    """What ``measure`` finds for the kernels of a library on this machine: measured at the first start, kept beside
    their library, so that processes choose alike. ``names``: of all that is measured; of other names other rates are
    kept. Raises :class:`NativeError`."""
    source = Source(file, macros)
    return library_cache.rates(compiler_for(source), source, names, measure)


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element, for an argument of type :data:`POINTER`."""
    return None if tensor is None else tensor.data_ptr()
