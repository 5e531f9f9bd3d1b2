"""What is counted in machine code."""

from __future__ import annotations

import pytest
from tools.machine_code.figures import Row
from tools.machine_code.products import MODELS, compile_op, tile_of
from tools.machine_code.sass import LOADS, STORES, MachineCode, buffers_in_flight, counted, loaded_bytes

from engine.kernels.triton.device import runs_triton

SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   ACQBULK ;
.L_x_1:
        /*0030*/                   MOV R2, R3 ;
.L_x_0:
        /*0040*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0050*/                   DEPBAR.LE SB0, 0x2 ;
        /*0060*/              @P1  HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/                   LDG.E.U16 R9, desc[UR4][R2.64] ;
        /*0090*/              @P2  BRA `(.L_x_1) ;
        /*00a0*/                   STG.E.64 desc[UR4][R2.64], R8 ;
        /*00b0*/                   EXIT ;
.L_x_2:
        /*00c0*/                   BRA `(.L_x_2);
"""


def test_the_inner_loop_is_found_and_what_is_in_it_counted() -> None:
    code = MachineCode(SASS)
    (loop,) = code.loops
    assert [one.kind for one in loop] == ["LDGSTS", "DEPBAR", "HMMA", "BRA"] and code.main_loop == loop
    assert (loaded_bytes(loop), buffers_in_flight(loop)) == (16, 2)
    assert (counted(code.instructions, LOADS), counted(code.instructions, STORES)) == (3, 1)
    assert [one.opcode for one in code.before_wait or ()] == ["LDC", "LDG.E.EF.128"]


@pytest.mark.skipif(runs_triton("cpu"), reason="interpreted kernels cannot be compiled")
def test_a_kernel_is_counted_weight_by_weight() -> None:
    tile = tile_of("out", MODELS["8B"], 1, 90, "bf16")
    cost = compile_op("out", MODELS["8B"], 1, 90, "bf16")
    row = Row.of("out", "bf16", 1, cost, tile.block_n * tile.block_k / (32 * tile.num_warps))
    assert row.loads_before_wait is not None and row.loads_before_wait >= 4 and row.load_bytes == 16
    assert row.instructions_per_weight is not None and 2 < row.instructions_per_weight < 6
    assert row.buffers is None and row.tensor_core == 0
