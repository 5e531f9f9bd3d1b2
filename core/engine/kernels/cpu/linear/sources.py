"""Which parts of the linear kernels a plan needs. Imports no torch: they are compiled while that is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.contracts.provider import BuildContext
from engine.native import Source

FLOAT, INTEGER = (Path(__file__).with_name(f"{name}_linear.cpp") for name in ("float", "integer"))
ELEMENTS = {"float32": "float", "bfloat16": "bfloat16"}
"""Types of ``x`` and results in C++."""
FORMATS = ("bytes", "nibbles", "e4m3", "e2m1")
"""Of quantized weights, as the numbers of ``Format`` in ``integer_linear.cpp``."""
INSTRUCTIONS = Source(INTEGER)
"""Says what this process may use."""


def float_source(dtype: str) -> Source:
    return Source(FLOAT, (f"ELEMENT={ELEMENTS[dtype]}",))


def integer_source(dtype: str, form: str) -> Source:
    """``form``: one of :data:`FORMATS`."""
    return Source(INTEGER, (f"ELEMENT={ELEMENTS[dtype]}", f"FORMAT={form.upper()}"))


def format_of(bits: int, floating: bool) -> str:
    return FORMATS[2 * floating + (bits == 4)]


def linear_sources(context: BuildContext, forms: Sequence[str] = (), plain: bool = True) -> tuple[Source, ...]:
    """Of a plan with weights in these formats, and ``plain`` ones in its dtype."""
    if context.device.kind != "cpu" or context.execution != "compile":
        return ()
    integers = (integer_source(context.dtype, form) for form in forms if context.dtype in ELEMENTS)
    floats = (float_source(context.dtype),) if plain and context.dtype in ELEMENTS else ()
    return (*integers, *floats, *((INSTRUCTIONS,) if forms else ()))
