"""Device functions that the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
WIDEN_DOT = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter holds bfloat16 as bit patterns and would multiply those as integers; so there, and only there,
operands already rounded to 16 bits are widened, which is what tensor cores do with them."""


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """Let the next kernel start: it may load what never changes, then it waits for this one to end."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_input(PDL: tl.constexpr):
    """Wait for all kernels before this one. Every kernel launched early does, even one that needs nothing: its end
    tells the next one that all before it have ended too. (A kernel launched normally starts after their end.)

    Before this line may be read: what no kernel of the step writes, weights above all; and what says where the step's
    tokens go, which kernels launched normally have written, with another such kernel between them and the first one
    launched early. Nothing may be written: what this kernel overwrites, the one before may still be reading."""
    if PDL:
        gdc_wait()


@triton.jit
def dot(a, b, acc):
    """``a @ b + acc`` with float32 accumulation; float32 operands are not cut to TF32."""
    if WIDEN_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def below(index, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """``index < LIMIT``, a constant where whole blocks of ``BLOCK`` fill ``LIMIT``: no mask to compute."""
    if LIMIT % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < LIMIT


@triton.jit
def tanh(x):
    """From ``exp2``: no library call, exact limits."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """See :data:`engine.contracts.ops.Act`; of float32."""
    if ACT == "silu":
        return gate / (1.0 + tl.exp2(-gate * LOG2E))
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        tl.static_assert(ACT == "relu" or ACT == "relu2", "unknown activation")
        positive = tl.where(gate < 0.0, 0.0, gate)  # NaN stays NaN
        return positive if ACT == "relu" else positive * positive


@triton.jit
def gated(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr):
    """See :class:`engine.contracts.ops.Gated`. NaN stays NaN: it is beyond no limit."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if OFFSET != 0.0:
        up += OFFSET
    if ALPHA == 1.0:
        return activated(gate, ACT) * up
    else:
        return gate / (1.0 + tl.exp2(-gate * (ALPHA * LOG2E))) * up


@triton.jit
def paired_rows(block, PAIRS: tl.constexpr):
    """The ``2 * PAIRS`` rows of a tile that computes pairs: pair of each row, and which of the two it is (0 or 1)."""
    row = tl.arange(0, 2 * PAIRS)
    return block * PAIRS + row // 2, row % 2


@triton.jit
def split_pairs(tile, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """``[2 * PAIRS, BLOCK_M]`` in the order of :func:`paired_rows` -> firsts and seconds ``[PAIRS, BLOCK_M]``."""
    return tl.split(tl.permute(tl.reshape(tile, [PAIRS, 2, BLOCK_M]), [0, 2, 1]))


@triton.jit
def best_of(values, index):
    """Largest of ``values`` along axis 0 and the lowest ``index`` that has it. NaN counts as infinity: it must not
    get lost, and it compares with nothing."""
    values = tl.where(values == values, values, float("inf"))
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == tl.expand_dims(best, 0), index, 2147483647), 0)
