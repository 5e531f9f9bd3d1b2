"""Load a kernel source as a ctypes library."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.native.compiler import NativeError, find_compiler

if TYPE_CHECKING:
    from torch import Tensor


@cache
def load(source: Path) -> ctypes.CDLL:
    """The functions of ``source``, compiled now unless an earlier process did. Raises :class:`NativeError`.

    Import torch first: its OpenMP library is then the one the kernels use, so that there is one team of threads.
    Set ``argtypes`` of the functions you call; a call releases the GIL.
    """
    compiler = find_compiler()
    if isinstance(compiler, str):
        raise NativeError(f"{source.name}: {compiler}")
    return ctypes.CDLL(str(compiler.build(source)))


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element, for an argument of type ``c_void_p``."""
    return None if tensor is None else tensor.data_ptr()
