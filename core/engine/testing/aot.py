"""Compile Triton kernels for a GPU that is not there, and read off what they cost.

``measure_kernel`` compiles one specialisation for a compute capability, as Triton would at the launch, and reads what
ptxas reported of it: registers and spills. Needs neither a GPU nor a driver; does not work under
``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

SHARED_LIMIT: dict[int, int] = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory one program may have, by compute capability (CUDA C++ programming guide)."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What a compiled kernel takes. Registers are per thread, everything else is bytes."""

    name: str
    capability: int
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    ptx: str = field(repr=False)
    """What was assembled."""
    cubin: bytes = field(repr=False)
    """Machine code."""
    layouts: str = field(repr=False, default="")
    """Triton's own form of it (TTGIR): which thread has which element of which tensor."""

    def __str__(self) -> str:
        return (
            f"{self.name} sm_{self.capability}: {self.registers} registers, {self.shared} B shared, "
            f"{self.spill_stores}+{self.spill_loads} B spilled"
        )


def measure_kernel(
    kernel: Any,
    arguments: Mapping[str, str | tuple[str, ...]],
    constants: Mapping[str, Any],
    capability: int,
    *,
    name: str = "",
    unaligned: frozenset[str] = frozenset(),
    **options: Any,
) -> KernelCost:
    """Compile ``kernel`` (a ``@triton.jit`` function) for ``capability`` (for example 90).

    ``arguments`` maps each run-time argument to its Triton type (``"*bf16"``, ``"i32"``, ``"fp32"``, or a tuple of
    such); ``constants`` holds the compile-time ones, ``None`` for a pointer that is not there. Pointers and ints are
    assumed divisible by 16, as a launch finds them to be, except those in ``unaligned``. ``options``: ``num_warps``,
    ``num_stages`` ...

    Raises ``ValueError`` when an argument is missing or unknown.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    stated = set(arguments) | set(constants)
    if stated != set(kernel.arg_names):
        raise ValueError(f"arguments of {kernel.__name__}: {sorted(stated ^ set(kernel.arg_names))} do not match")
    signature = {arg: arguments.get(arg, "constexpr") for arg in kernel.arg_names}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (arg, kind) in enumerate(signature.items()):
        kinds: list[tuple[tuple[int, ...], str]] = (
            [((i,), kind)] if isinstance(kind, str) else [((i, j), one) for j, one in enumerate(kind)]
        )
        for place, one in kinds:
            if arg not in unaligned and (one.startswith("*") or one in ("i32", "i64")):
                attrs[place] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    options = {"enable_fp_fusion": True, **options}
    report = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(report):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True  # a kernel from the cache has no report
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stores, loads = _costs(report.getvalue())
    shared, ptx, cubin = int(compiled.metadata.shared), str(compiled.asm["ptx"]), bytes(compiled.asm["cubin"])
    layouts, title = str(compiled.asm["ttgir"]), name or kernel.__name__
    return KernelCost(title, capability, registers, shared, stores, loads, ptx, cubin, layouts)


def _costs(report: str) -> tuple[int, int, int]:
    """Registers, spill stores and spill loads."""
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", report, re.DOTALL)
    assert found is not None, f"ptxas said nothing about registers: {report}"
    return int(found[3]), int(found[1]), int(found[2])
