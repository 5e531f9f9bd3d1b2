"""Kernel libraries in this process."""

from __future__ import annotations

import ctypes
import fcntl
import os
from functools import cache
from pathlib import Path

from engine.native import ahead, library_cache
from engine.native.compiler import INSTEAD, Compiler, NativeError, Source, find_compiler

THREAD_POOL = Source(Path(__file__).with_name("thread_pool.cpp"))
"""What kernels compute on."""


@cache
def open_library(source: Source) -> ctypes.CDLL:
    """The library of ``source`` with its functions as ctypes has them. Raises :class:`NativeError`."""
    library = _open(source)
    if source != THREAD_POOL and hasattr(library, "thread_pool"):  # it includes thread_pool.h
        functions = ctypes.c_char.in_dll(open_library(THREAD_POOL), "functions")
        ctypes.c_void_p.in_dll(library, "thread_pool").value = ctypes.addressof(functions)
    return library


def _open(source: Source) -> ctypes.CDLL:
    compiler = compiler_for(source)
    try:
        return from_memory(ahead.take(compiler, source) or library_cache.build(compiler, source), source.name)
    except OSError:  # kept by a machine with other system libraries
        built = library_cache.build(compiler, source, anew=True)
    try:
        return from_memory(built, source.name)
    except OSError as error:
        raise NativeError(f"{source.file.name} was just built and does not load: {error}; {INSTEAD}") from error


def compiler_for(source: Source) -> Compiler:
    """The compiler of this machine. Raises :class:`NativeError`: ``source`` cannot be built."""
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
