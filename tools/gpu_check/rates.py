"""What the card can do at best, measured: every other number is a share of these.

Reading is what decoding is bound by, so its rate is the best of several reductions over far more bytes than any cache
holds: a slow reduction as the yardstick would flatter everything measured with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_check.floors import sheet_rates
from gpu_check.section import FACTS, Context, Row
from gpu_check.timing import device_ms


@triton.jit
def add_up(x_ptr, out_ptr, per_program, BLOCK: tl.constexpr):
    """Program ``i`` sums ``per_program`` float32, a multiple of ``BLOCK``, from its place on."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, per_program, BLOCK):
        at = program * per_program + start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, eviction_policy="evict_first")
    tl.store(out_ptr + program, tl.sum(total, 0))


def run(context: Context) -> None:
    device = context.device
    read_bytes, size = (1 << 22, 256) if context.dry_run else (8 << 30, 8192)
    read, copy = memory_rates(read_bytes, device)
    best = max(read, key=lambda name: read[name])
    gemm = gemm_rate(size, device)
    rates = {"read_gb_s": read[best], "copy_gb_s": copy, "gemm_tflop_s": gemm}
    (context.scratch / FACTS).write_text(json.dumps(rates))
    sheet = sheet_rates(context.card)
    rows = (
        Row(f"read bandwidth ({best})", round(read[best], 1), "GB/s", floor=sheet.get("read_gb_s"),
            detail=read | device_detail(device)),
        Row("copy bandwidth", round(copy, 1), "GB/s", floor=sheet.get("copy_gb_s")),
        Row(f"bf16 GEMM {size}^3", round(gemm, 1), "TFLOP/s", floor=sheet.get("gemm_tflop_s")),
    )  # fmt: skip
    for row in rows:
        context.emit(row)


def memory_rates(num_bytes: int, device: str) -> tuple[dict[str, float], float]:
    """GB/s of each reduction, and of a copy, which counts bytes read and written."""
    memory = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read = {name: size / device_ms(call, device) / 1e6 for name, (call, size) in reductions(memory, device).items()}
    target = torch.empty_like(memory)
    return read, 2 * num_bytes / device_ms(lambda: target.copy_(memory), device) / 1e6


def gemm_rate(size: int, device: str) -> float:
    """TFLOP/s of a square bfloat16 product of random numbers: zeros would be multiplied faster."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / device_ms(lambda: a @ b, device) / 1e9


def reductions(memory: Tensor, device: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Ways to read ``memory`` once, and how many bytes of it each reads."""
    half, everything = memory.view(torch.bfloat16), memory.nbytes
    matrix, vector = half.view(-1, 2048), torch.ones(2048, dtype=torch.bfloat16, device=device)
    found: dict[str, tuple[Callable[[], Any], int]] = {
        "sum": (memory.sum, everything),
        "largest": (half.amax, everything),
        "matrix x vector": (lambda: matrix @ vector, everything),
    }
    if device == "cpu":
        return found
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for programs, block, warps in ((8, 2048, 8), (16, 1024, 4), (32, 2048, 8)):
        found[f"kernel {block} x {programs}"] = kernel(memory, processors * programs, block, warps)
    return found


def kernel(memory: Tensor, programs: int, block: int, warps: int) -> tuple[Callable[[], Any], int]:
    """:func:`add_up` over all of ``memory`` that divides evenly, and its bytes."""
    per_program = memory.numel() // programs // block * block
    out = torch.empty(programs, dtype=torch.float32, device=memory.device)
    read = programs * per_program * memory.element_size()
    return lambda: add_up[(programs,)](memory, out, per_program, BLOCK=block, num_warps=warps), read


def device_detail(device: str) -> dict[str, float]:
    if device == "cpu":
        return {"threads": torch.get_num_threads()}
    return {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count}
