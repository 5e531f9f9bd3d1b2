"""Kernels beside the products: norm, gated activation and rounding of rows, and the token with the largest logit."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.torch.reference import NOT_FINITE
from engine.kernels.triton.narrow_types import to_e4m3, to_int8
from engine.kernels.triton.product import load_row
from engine.kernels.triton.tile_ops import activated, below, best_of, start_dependents, wait_for_input

_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def gate_rows(
    x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``act(gate) * up`` of ``[rows, 2 * SIZE]``, gates first -> ``[rows, SIZE]``. Program ``(row, block)``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = below(column, SIZE, BLOCK)
    gate = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (activated(gate, ACT) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_rows(x_ptr, norm_ptr, out_ptr, stride_x, eps, SIZE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """``norm(x) [rows, SIZE]``. Program ``row``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    norm_row(x_ptr + row * stride_x, norm_ptr, out_ptr + row * SIZE, None, eps, SIZE, BLOCK)


@triton.jit
def norm_row(row_ptr, norm_ptr, out_ptr, copy_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``row / rms(row) * norm`` in float32, rounded once; to ``copy_ptr``, too, unless it is ``None``."""
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        x, _ = load_row(row_ptr, None, start, SIZE, BLOCK)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        x, _ = load_row(row_ptr, None, start, SIZE, BLOCK)
        weight, _ = load_row(norm_ptr, None, start, SIZE, BLOCK)
        normed = (x * scale * weight).to(out_ptr.dtype.element_ty)
        column = start + tl.arange(0, BLOCK)
        mask = below(column, SIZE, BLOCK)
        tl.store(out_ptr + column, normed, mask=mask)
        if copy_ptr is not None:
            tl.store(copy_ptr + column, normed, mask=mask)


@triton.jit
def quantize_rows(
    x_ptr, norm_ptr, code_ptr, step_ptr, stride_x, eps,
    SIZE: tl.constexpr, FLOAT8: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``norm(x) [rows, SIZE]`` in 8 bits: int8, or the bits of e4m3 in uint8, and each row's float32 step. Program
    ``row``.

    The rms divides the largest element and all others alike: codes do not depend on it, only the step does. A row that
    is not finite has NaN for its step, and so are its products.
    """
    start_dependents(PDL)
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares, largest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        x, y = load_row(x_ptr + row * stride_x, norm_ptr, start, SIZE, BLOCK)
        squares += x * x
        largest = tl.maximum(largest, tl.where(y == y, tl.abs(y), float("inf")))  # a maximum may lose a NaN
    LEVELS: tl.constexpr = 448.0 if FLOAT8 else 127.0
    top = tl.max(largest, 0)
    step = tl.maximum(tl.div_rn(top, top * 0.0 + LEVELS), 1e-20)
    rms = 1.0
    if norm_ptr is not None:
        rms = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    tl.store(step_ptr + row, tl.where(top < float("inf"), step * rms, float("nan")))
    for start in range(0, SIZE, BLOCK):
        _, y = load_row(x_ptr + row * stride_x, norm_ptr, start, SIZE, BLOCK)
        column = start + tl.arange(0, BLOCK)
        scaled = tl.div_rn(y, step + tl.zeros_like(y))
        codes = to_e4m3(scaled) if FLOAT8 else to_int8(scaled)
        tl.store(code_ptr + row * SIZE + column, codes, mask=below(column, SIZE, BLOCK))


@triton.jit
def best_of_chunks(logits_ptr, best_ptr, index_ptr, VOCAB: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Largest of each chunk of ``BLOCK`` float32 logits, and its column. Program ``(row, chunk)``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = below(column, VOCAB, BLOCK)
    values = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + column, mask=mask, other=float("-inf"))
    best, index = best_of(values, column)
    at = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + at, best)
    tl.store(index_ptr + at, index)


@triton.jit
def best_of_blocks(
    best_ptr, index_ptr, token_ptr, COUNT: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The winner among ``COUNT`` (value, column) of a row; of equals the lowest column, ``NOT_FINITE`` (-1) if the
    largest is not finite (the row's logits are broken). Program ``row``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row = tl.program_id(0)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = below(at, COUNT, BLOCK)
        value = tl.load(best_ptr + row.to(tl.int64) * COUNT + at, mask=mask, other=float("-inf"))
        column = tl.load(index_ptr + row.to(tl.int64) * COUNT + at, mask=mask, other=2147483647)
        better = (value > best) | ((value == best) & (column < index))
        best, index = tl.where(better, value, best), tl.where(better, column, index)
    largest, token = best_of(best, index)
    token = tl.where(tl.abs(largest) < float("inf"), token, _NOT_FINITE)
    tl.store(token_ptr + row, token.to(tl.int64))
