"""Load a kernel source as a ctypes library."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.native import ahead, library_cache
from engine.native.calls import Function
from engine.native.compiler import INSTEAD, Compiler, NativeError, Source, find_compiler

if TYPE_CHECKING:
    from torch import Tensor

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
"""Types of arguments."""
THREAD_POOL = Source(Path(__file__).with_name("thread_pool.cpp"))
"""What kernels compute on."""
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


@cache
def open_library(source: Source) -> ctypes.CDLL:
    """The library of ``source`` with its functions as ctypes has them. Raises :class:`NativeError`."""
    library = _open(source)
    if source != THREAD_POOL and hasattr(library, "thread_pool"):  # it includes thread_pool.h
        functions = ctypes.c_char.in_dll(open_library(THREAD_POOL), "functions")
        ctypes.c_void_p.in_dll(library, "thread_pool").value = ctypes.addressof(functions)
    return library


def _open(source: Source) -> ctypes.CDLL:
    compiler = _compiler(source)
    try:
        return from_memory(ahead.take(compiler, source) or library_cache.build(compiler, source), source.name)
    except OSError:  # kept by a machine with other system libraries
        built = library_cache.build(compiler, source, anew=True)
    try:
        return from_memory(built, source.name)
    except OSError as error:
        raise NativeError(f"{source.file.name} was just built and does not load: {error}; {INSTEAD}") from error


def rates(
    file: Path, names: Sequence[str], measure: Callable[[], dict[str, float]], macros: tuple[str, ...] = ()
) -> dict[str, float]:
    """What ``measure`` finds for the kernels of a library on this machine: measured at the first start, kept beside
    their library, so that processes choose alike. ``names``: of all that is measured; of other names other rates are
    kept. Raises :class:`NativeError`."""
    source = Source(file, macros)
    return library_cache.rates(_compiler(source), source, names, measure)


def _compiler(source: Source) -> Compiler:
    compiler = find_compiler()
    if isinstance(compiler, str):
        raise NativeError(f"{source.file.name}: {compiler}")
    return compiler


def from_memory(library: bytes, name: str) -> ctypes.CDLL:
    """From memory that nobody can change: a file that gets shorter while it is mapped ends its process.

    ``name`` is shown by debuggers. Raises ``OSError``.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as memory:
            memory.write(library)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        # Open for good: the system's loader knows a library by its path, and the next one must have another.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except BaseException:
        os.close(descriptor)
        raise


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element, for an argument of type :data:`POINTER`."""
    return None if tensor is None else tensor.data_ptr()
