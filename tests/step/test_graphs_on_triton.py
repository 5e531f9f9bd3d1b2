"""Kernels of captured steps: ``test_graphs.py`` in Triton's interpreter; those that fill or settle a step, compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.kernels.triton.device import runs_triton
from engine.testing.aot import measure_kernel
from tests.interpreted import run_interpreted, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_captured_steps_are_the_same_when_kernels_fill_them_and_sample() -> None:
    claims = "replay_computes or nobodys or move_on or penalties or mix-3 or broken"
    assert run_interpreted(Path(__file__).with_name("test_graphs.py"), select=claims, marked="") == 8


@pytest.mark.slow
@starts_interpreter
def test_the_kernel_that_fills_a_step_fills_it_for_every_kv_group() -> None:
    """Groups whose tokens ranks share out included. The default run has a case of each test, with other interpreted
    tests: see ``tests/interpreted.py``."""
    claims = "each_group or share_out_tokens"
    assert run_interpreted(Path(__file__).with_name("test_tables.py"), select=claims, marked="") == 7


@pytest.mark.skipif(runs_triton("cpu"), reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernel_that_fills_a_step_compiles_for_real_gpus_without_spills(capability: int) -> None:
    from engine.kernels.triton.step_inputs import BLOCK_IDS, step_inputs

    longs = ("inputs_ptr", "tokens_ptr", "ids_ptr", "positions_ptr", "row_ids_ptr", "mapping_ptr", "computed_ptr")
    ints = ("tables_ptr", "lengths_ptr", "row_tables_ptr")
    strides = ("tokens_stride", "tables_stride", "tables_group", "mapping_group", "row_tables_group")
    sizes = (*strides, "num_blocks", "nobody")
    arguments = dict.fromkeys(longs, "*i64") | dict.fromkeys(ints, "*i32") | dict.fromkeys(sizes, "i32")
    for queries, block_q in ((5, 8), (512, 512)):
        constants = {"QUERIES": queries, "BLOCK_SIZE": 16, "BLOCK_Q": block_q, "BLOCK": BLOCK_IDS}
        cost = measure_kernel(step_inputs, arguments, constants, capability, num_warps=4)
        print(cost)
        assert cost.spill_stores == cost.spill_loads == 0


@pytest.mark.skipif(runs_triton("cpu"), reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernel_that_settles_a_step_compiles_for_real_gpus_without_spills(capability: int) -> None:
    from engine.kernels.triton.step_outputs import step_outputs

    names = ("inputs", "ids", "positions", "chosen", "kept", "accepted", "tokens", "computed")
    arguments = {f"{name}_ptr": "*i64" for name in names}
    arguments |= dict.fromkeys(("tokens_stride", "num_rows", "nobody"), "i32")
    cost = measure_kernel(step_outputs, arguments, {"QUERIES": 5, "BLOCK_Q": 8}, capability, num_warps=1)
    print(cost)
    assert cost.spill_stores == cost.spill_loads == 0
