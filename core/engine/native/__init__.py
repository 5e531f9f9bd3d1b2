"""C++ kernels for the CPU of this machine: compiled when first needed, kept on disk, called through ctypes.

A kernel is one ``.cpp`` file with ``extern "C"`` functions over raw pointers; it may include the headers of this
folder and of its own. The core and plugins load theirs the same way::

    kernels = native.load(Path(__file__).with_name("scale.cpp"), {"scale": (native.POINTER, native.INT64)})
    kernels.scale(native.pointer(x), x.numel())

A kernel with many templates is compiled in parts: ``macros`` say which (``ELEMENT=bfloat16``). What a plan will need is
best named ahead (``Provider.sources``): start-up then compiles all of it at once, while torch is imported.

``thread_pool.h`` shares work among threads. A source is compiled for exactly this processor (``-march=native``, or what
``CXX`` names), so its macros (``__AVX512BF16__``, ``__AMX_BF16__``, ...) say what it may use.
"""

from engine.native.calls import Function, NativeCall, in_one
from engine.native.compiler import Compiler, NativeError, Source, find_compiler
from engine.native.loader import ACTIVATIONS, FLOAT, INT32, INT64, POINTER, load, pointer, rates

__all__ = [
    "ACTIVATIONS", "FLOAT", "INT32", "INT64", "POINTER", "Compiler", "Function", "NativeCall", "NativeError",
    "Source", "find_compiler", "in_one", "load", "pointer", "rates",
]  # fmt: skip
