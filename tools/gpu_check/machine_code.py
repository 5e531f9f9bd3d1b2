"""What the compiled kernels do around the wait of a dependent launch, read from their machine code.

A kernel that is launched before its predecessor ends must wait for it (``griddepcontrol.wait``, ``ACQBULK`` in SASS)
before it writes anything, and gains something only if its weights are on their way by then: at least one load from
global memory above the wait in every kernel that has weights.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tools.machine_code.products import MODELS, compile_op
from tools.machine_code.sass import LOADS, STORES, MachineCode, counted, disassembled
from triton.runtime.jit import JITFunction

from gpu_check.engine_run import EngineRun
from gpu_check.section import Context, Row
from gpu_check.shapes import SHAPES, folder_of, write


@dataclass(frozen=True, slots=True)
class Wait:
    """What lies above the first wait of a kernel."""

    kernel: str
    waits: bool
    loads_before: int
    stores_before: int
    has_weights: bool

    @property
    def is_right(self) -> bool:
        return self.waits and self.stores_before == 0 and (self.loads_before > 0 or not self.has_weights)

    def __str__(self) -> str:
        if not self.waits:
            return f"{self.kernel}: never waits"
        return f"{self.kernel}: {self.loads_before} loads and {self.stores_before} stores before the wait"


def run(context: Context) -> None:
    if context.dry_run:
        found = [judge("linear_store (compiled for sm_90)", compile_op("out", MODELS["1B"], 1, 90).cubin, True)]
    else:
        if torch.cuda.get_device_capability() < (9, 0):
            context.emit(Row("dependent launch", detail="this device has none (compute capability below 9.0)"))
            return
        for name, shape in SHAPES.items():
            exercise(name, replace(shape, num_hidden_layers=2), context)
        found = [judge(f"{fn.__name__} {shape_of(kernel)}", cubin, "weight_ptr" in fn.arg_names)
                 for fn, kernel, cubin in launched_early()]  # fmt: skip
    for kernel in sorted({wait.kernel.split()[0] for wait in found}):
        mine = [wait for wait in found if wait.kernel.split()[0] == kernel]
        context.emit(summary(kernel, mine))
    if not found:
        context.emit(Row("kernels launched early", "none", target="> 0", held=False))


def summary(kernel: str, found: list[Wait]) -> Row:
    """All specialisations of a kernel in one row."""
    right = sum(wait.is_right for wait in found)
    least = min(wait.loads_before for wait in found)
    measured = f"{right} of {len(found)} right, at least {least} loads before the wait"
    target = "loads before the wait, no stores" if found[0].has_weights else "waits, no stores before"
    return Row(kernel, measured, target=target, held=right == len(found), detail=[str(wait) for wait in found])


def exercise(name: str, shape: Any, context: Context) -> None:
    """Launch every kernel that steps of a model of these widths launch. Two layers are as good as all."""
    folder = context.scratch / f"{folder_of(name, context.scratch).name}-two-layers"
    write(shape, folder, torch.bfloat16, context.device)
    run = EngineRun(folder, context.device, ["scheduler.max_requests=16", "drafter=none", "model.max_len=512"])
    for rows in (1, 2, 16):
        run.generate([tuple(range(4, 40 + i)) for i in range(rows)], 4)
    run.close()
    shutil.rmtree(folder)


def launched_early() -> Iterator[tuple[Any, Any, bytes]]:
    """Kernels of this process that were compiled for dependent launch: function, kernel, machine code."""
    for thing in gc.get_objects():
        if isinstance(thing, JITFunction):
            for caches in thing.device_caches.values():
                for kernel in caches[0].values():
                    if getattr(kernel.metadata, "launch_pdl", False):
                        yield thing, kernel, kernel.asm["cubin"]


def shape_of(kernel: Any) -> str:
    return f"({kernel.metadata.num_warps} warps, {kernel.metadata.num_stages} stages, {kernel.hash[:8]})"


def judge(name: str, cubin: bytes, has_weights: bool) -> Wait:
    code = MachineCode(disassembled(cubin))
    above = code.before_wait
    before = code.instructions if above is None else above
    return Wait(name, above is not None, counted(before, LOADS), counted(before, STORES), has_weights)
