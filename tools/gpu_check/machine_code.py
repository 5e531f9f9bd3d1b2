"""What the compiled kernels do around the wait of a dependent launch, read from their machine code.

A kernel that is launched before its predecessor ends must wait for it (``griddepcontrol.wait``, ``ACQBULK`` in SASS)
before it writes anything, and gains something only if its weights are on their way by then: at least one load from
global memory above the wait in every kernel that has weights.
"""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from gpu_check.engine_run import EngineRun
from gpu_check.section import Context, Row
from gpu_check.shapes import SHAPES, folder_of, write

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
WAIT, LOADS, STORES = "ACQBULK", ("LDG", "LDGSTS", "UTMALDG", "UBLKCP"), ("STG", "RED", "ATOM", "ATOMG", "UTMASTG")


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
        found = [judge("linear_store (compiled for sm_90)", example(), True)]
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
    opcodes = [match[1].partition(".")[0] for match in INSTRUCTION.finditer(disassembled(cubin))]
    assert opcodes, f"no instructions in the disassembly of {name}"
    waits = WAIT in opcodes
    above = opcodes[: opcodes.index(WAIT)] if waits else opcodes
    loads, stores = (sum(opcode in kinds for opcode in above) for kinds in (LOADS, STORES))
    return Wait(name, waits, loads, stores, has_weights)


def disassembled(cubin: bytes) -> str:
    """SASS by ``nvdisasm``, which comes with Triton; raises ``FileNotFoundError`` where there is none."""
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    tool = str(bundled) if bundled.exists() else shutil.which("nvdisasm")
    if tool is None:
        raise FileNotFoundError("nvdisasm: neither in triton's folder nor on the PATH (it is part of CUDA)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-hex", file.name], check=True, capture_output=True, text=True).stdout


def example() -> bytes:
    """A kernel with weights, compiled without a GPU for one that has dependent launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.kernels.triton.skinny import linear_store
    from engine.kernels.triton.tiles import skinny_tile
    from engine.kernels.triton.weights import load_plain

    tile = skinny_tile(1, 2048, 2048, 132, 16)
    arguments = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "num_rows": "i32", "stride_x": "i32",
                 "stride_out": "i32", "eps": "fp32"}  # fmt: skip
    constants: dict[str, Any] = {
        "IN_FEATURES": 2048, "OUT_FEATURES": 2048, "GROUP_SIZE": 0, "LOAD_TILE": load_plain, "PDL": True, "ADD": True,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    constants |= {name: None for name in linear_store.arg_names if name not in arguments and name not in constants}
    signature = {name: arguments.get(name, "constexpr") for name in linear_store.arg_names}
    source = ASTSource(fn=linear_store, signature=signature, constexprs=constants)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": True, "enable_fp_fusion": True}
    cubin: bytes = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    return cubin
