"""What a compiled kernel costs, in figures."""

from __future__ import annotations

from dataclasses import dataclass

from tools.machine_code.products import FORMATS, SMS
from tools.machine_code.sass import (
    LOADS,
    TENSOR_CORES,
    MachineCode,
    buffers_in_flight,
    counted,
    disassembled,
)

from engine.testing.aot import KernelCost

LANES = 128
"""Threads that a multiprocessor issues an instruction for in a cycle."""
CARDS = {80: ("A100", 1.41, 2.04), 89: ("L40S", 2.52, 0.86), 90: ("H200", 1.755, 4.8)}
"""By compute capability: a card, the clock in GHz that ceilings are computed with, and the TB/s of its data sheet."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one compiled kernel."""

    kernel: str
    format: str
    rows: int
    arch: int
    registers: int
    spills: int
    """Bytes stored and loaded."""
    smem: int
    """Bytes."""
    tensor_core: int
    """Such instructions in the main loop."""
    load_bytes: int
    """Of the widest load of the main loop, for one thread."""
    buffers: int | None
    """Asynchronous copies that may be in flight when the main loop waits for one; ``None``: it has none."""
    loads_before_wait: int | None
    """``None``: it waits for no kernel."""
    instructions_per_weight: float | None
    """In the main loop, for one thread; of decode attention for each cached number; ``None``: of others."""
    ceiling_tb_s: float | None
    narrow_reads: int
    """Single bytes that a thread reads from shared memory in a round of the main loop."""

    @classmethod
    def of(
        cls, name: str, form: str, rows: int, cost: KernelCost, weights: float | None, bits: int | None = None
    ) -> Row:
        """``weights``: that a thread multiplies by in a round of the main loop. ``bits``: of each; ``None``: those of
        the format, which is one of weights."""
        code = MachineCode(disassembled(cost.cubin))
        loop, before = code.main_loop, code.before_wait
        loads = [one.width for one in loop if one.kind in LOADS]
        _, clock, _ = CARDS[cost.capability]
        bits = FORMATS[form].bits if bits is None else bits
        if streamed := sum(one.width for one in loop if "EF" in one.opcode.split(".")):
            weights = streamed * 8 / bits  # a loop that is unrolled reads several tiles
        each = None if weights is None else len(loop) / weights
        return cls(
            name, form, rows, cost.capability, cost.registers, cost.spill_stores + cost.spill_loads, cost.shared,
            counted(loop, TENSOR_CORES), max(loads, default=0), buffers_in_flight(loop),
            None if before is None else counted(before, LOADS),
            None if each is None else round(each, 2),
            None if each is None else round(LANES * SMS[cost.capability] * clock * bits / 8 / each / 1e3, 2),
            sum(one.kind == "LDS" and one.width == 1 for one in loop),
        )  # fmt: skip
