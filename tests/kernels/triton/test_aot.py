"""The kernels compile for real GPUs, within their registers and shared memory. No GPU needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import triton
from tools.machine_code.figures import Row
from tools.machine_code.products import FORMATS, MODELS, OPS, PACKED, SMS, cache_of, compile_op, compile_skinny, tile_of

from engine.kernels.triton import chain_inputs, experts, heads, joined_norms, rotation, routing, rowwise, sums
from engine.kernels.triton.quantized import kernels
from engine.kernels.triton.tiles import GROUPED_ROWS, MAX_ROWS
from engine.testing.aot import SHARED_LIMIT, KernelCost, measure_kernel
from tests.selection import few

HOPPER_FIRST = [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 89))]
"""Most kernels compile for Hopper in every run; plain ones and packed ones for the other two in a case or two, and the
rest of the product on demand."""


def only(kept: tuple[Any, ...], *lists: Sequence[Any]) -> list[Any]:
    """The product of what varies, slow but for one case: of the other tests some keep another architecture."""
    return [pytest.param(*each, marks=() if each == kept else pytest.mark.slow) for each in product(*lists)]


def hopper_or(everywhere: str, names: Sequence[str]) -> list[Any]:
    """``(name, capability)``: all names on Hopper, one of them on every architecture; the rest are slow."""
    return [
        pytest.param(name, capability, marks=() if capability == 90 or name == everywhere else pytest.mark.slow)
        for name in names
        for capability in SMS
    ]


def assert_fits(cost: KernelCost, spills: int = 0) -> None:
    print(cost)
    assert cost.shared <= SHARED_LIMIT[cost.capability], cost
    assert cost.spill_stores <= spills and cost.spill_loads <= spills, cost


OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
FEW_WORDS = 8 if OLD else 0
"""Bytes that the assembler of older releases of Triton spills of packed weights to reach the next step of occupancy."""


def few_words(weights: str, rows: int) -> int:
    """The same where tensor cores read words: those of the present release, too."""
    return 8 if rows <= MAX_ROWS and FORMATS[weights].words is not None else FEW_WORDS


@few(1)
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("op", [op for op in OPS if op != "out"])
def test_decoding_compiles_without_spills(op: str, capability: int) -> None:
    assert_fits(compile_op(op, MODELS["8B"], 1, capability))


@pytest.mark.parametrize(
    ("op", "sizes"), only(("qkv", (90, 4)), [op for op in OPS if op != "down"], [(80, 16), (89, 16), (90, 4)])
)
def test_few_rows_compile_without_spills(op: str, sizes: tuple[int, int]) -> None:
    capability, rows = sizes
    assert_fits(compile_op(op, MODELS["1B"], rows, capability))


@few(1)
@pytest.mark.parametrize(("weights", "capability"), hopper_or("mxfp4", PACKED[::-1]))
@pytest.mark.parametrize("op", ["gate_up", pytest.param("out", marks=pytest.mark.slow)])
def test_packed_weights_compile_without_spills(op: str, capability: int, weights: str) -> None:
    rows = {"out": 16 if capability == 90 else 4, "gate_up": 1}[op]
    assert_fits(compile_op(op, MODELS["8B"], rows, capability, weights), few_words(weights, rows))


@few(1)
@pytest.mark.parametrize(
    ("op", "model", "rows"),
    [*((op, "8B", 1) for op in OPS if op != "out"), *((op, "1B", 4) for op in OPS if op != "down")],
)
def test_weights_are_on_their_way_before_the_wait_and_inputs_are_not(op: str, model: str, rows: int) -> None:
    """With dependent launch, what is loaded before the wait overlaps with the kernel before; only weights may be."""
    before, after = compile_op(op, MODELS[model], rows, 90).ptx.split("griddepcontrol.wait")
    assert before.count("griddepcontrol.launch_dependents") == 1
    weights = re.findall(r"ld\.global.*evict_first.*\.v4\.b32", before)
    assert len(weights) >= 4 and before.count("ld.global") == len(weights)
    assert "st.global" not in before and "st.global" in after


@pytest.mark.parametrize(
    ("weights", "rows"),
    [pytest.param(*each, marks=() if each == ("int4", 1) else pytest.mark.slow) for each in product(PACKED, (1, 16))],
)
def test_packed_weights_travel_16_bytes_at_a_time_and_are_unpacked_after_the_wait(weights: str, rows: int) -> None:
    """What is unpacked must have arrived: nothing is before the input has."""
    ptx = compile_op("out", MODELS["8B"], rows, 90, weights).ptx
    before, after = ptx.split("griddepcontrol.wait")
    form, tile = FORMATS[weights], tile_of("out", MODELS["8B"], rows, 90, weights)
    per_thread = tile.block_n * tile.block_k * form.bits // 8 // (32 * tile.num_warps)
    assert per_thread >= 16
    wide = re.findall(r"ld\.global\S*evict_first\S*\.v4\.b32", before)
    tiles_before = 2 if rows == 1 or tile.in_words else 1
    assert len(wide) == tiles_before * per_thread // 16
    assert not re.findall(r"ld\.global\S*evict_first(?!\S*\.v4\.b32)", ptx)
    unpacking = "lop3", "prmt", "e4m3x2"
    assert not any(word in before for word in unpacking) and any(word in after for word in unpacking)
    assert "st.global" not in before


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "weights", "capability"), only((64, "int8", 80), (17, 64), PACKED, SMS))
def test_packed_weights_that_are_read_once_for_many_rows_compile_without_spills(
    rows: int, weights: str, capability: int
) -> None:
    assert_fits(compile_op("down", MODELS["8B"], rows, capability, weights), FEW_WORDS)


@pytest.mark.parametrize(
    ("weights", "rows", "capability"),
    [
        # One that other tests compile, too.
        pytest.param(*each, marks=() if each == ("int4", 1, 90) else pytest.mark.slow)
        for each in product(("int4", "int4 zeros", "fp8", "int8", "mxfp4"), (1, 16), (80, 90))
    ],
)
def test_an_element_of_a_tensor_in_words_is_a_threads(weights: str, rows: int, capability: int) -> None:
    """Tensor cores take from each lane what the PTX manual says; the compiler does not know that they do."""
    tile = tile_of("gate_up", MODELS["8B"], rows, capability, weights)
    lines = compile_op("gate_up", MODELS["8B"], rows, capability, weights).layouts.splitlines()
    operands = [re.findall(r"tensor<(\d+)x\w+, (#\w+)>", line) for line in lines if "mma.sync" in line]
    (size, layout), *others = {operand for found in operands for operand in found}
    assert others == [] and int(size) == 32 * tile.num_warps and tile.in_words
    (meaning,) = (line for line in lines if line.startswith(f"{layout} = "))
    assert "sizePerThread = [1], threadsPerWarp = [32], " in meaning, meaning


MOST_INSTRUCTIONS = {
    ("int8", 1): 3.6, ("int4", 1): 3.2, ("int4 zeros", 1): 3.4, ("fp8", 1): 3.6, ("int4", 16): 3.8, ("mxfp4", 1): 4.2,
}  # fmt: skip
"""For each weight, in the main loop: above 6.6 (8 bits) or 3.3 (4 bits) an H200 issues more slowly than it reads."""


@pytest.mark.skipif(OLD, reason="older compilers emit others")
@pytest.mark.parametrize(
    ("weights", "rows"),
    [pytest.param(*each, marks=() if each == ("int4", 1) else pytest.mark.slow) for each in MOST_INSTRUCTIONS],
)
def test_packed_weights_take_few_instructions(weights: str, rows: int) -> None:
    tile = tile_of("out", MODELS["8B"], rows, 90, weights)
    cost = compile_op("out", MODELS["8B"], rows, 90, weights)
    row = Row.of("out", weights, rows, cost, tile.block_n * tile.block_k / (32 * tile.num_warps))
    assert row.instructions_per_weight is not None
    assert row.instructions_per_weight <= MOST_INSTRUCTIONS[weights, rows], row


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_every_variant_compiles_without_spills(op: str, weights: str, model: str, rows: int, capability: int) -> None:
    assert_fits(compile_op(op, MODELS[model], rows, capability, weights), few_words(weights, rows))


def compile_writer(
    head_dim: int, capability: int, *, head_norm: bool, store: str = "native", scale: str = "none"
) -> KernelCost:
    norms = dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), "*fp32") if head_norm else {}
    arguments = {
        "qkv_ptr": "*bf16", "stride_token": "i32", "q_eps": "fp32", "k_eps": "fp32", **cache_of(store)[0], **norms,
    }  # fmt: skip
    block_p = triton.next_power_of_2(head_dim // 2)
    constants = {
        "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "ROTARY_DIM": head_dim, "SCALE": scale,
        "LARGEST": 127.0, "STORE_TILE": cache_of(store)[1], "PDL": capability >= 90, "BLOCK_H": max(1, 256 // block_p),
        "BLOCK_P": block_p,
    }  # fmt: skip
    kernel = heads.norm_rope_write
    constants |= {name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in arguments}
    return measure_kernel(
        kernel, arguments, constants, capability, name=f"norm_rope_write head_dim {head_dim} norm {head_norm}",
        num_warps=2,
    )  # fmt: skip


WRITERS: dict[str, dict[str, Any]] = {
    "int8": {"head_norm": True, "store": "int8", "scale": "per_token_head"},
    "fp8": {"head_norm": True, "store": "fp8", "scale": "per_layer_head"},
    "head norm": {"head_norm": True},
    "plain": {"head_norm": False},
    "head norm of 80": {"head_norm": True, "head_dim": 80},
    "head norm of 256": {"head_norm": True, "head_dim": 256},
}


@few(1)
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("name", WRITERS)
def test_keys_are_written_without_spills(name: str, capability: int) -> None:
    assert_fits(compile_writer(**{"head_dim": 128, **WRITERS[name]}, capability=capability))


@few(1)
@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow), 90])
def test_the_kernels_between_products_compile_without_spills(capability: int) -> None:
    pdl = {"PDL": capability >= 90}
    gate = {"x_ptr": "*bf16", "out_ptr": "*bf16", "stride_x": "i32"}
    constants = {"SIZE": 14336, "ACT": "silu", "BLOCK": 1024, **pdl}
    assert_fits(measure_kernel(rowwise.gate_rows, gate, constants, capability, num_warps=4))
    joins = ("token", "table", "x", "table_norm", "x_norm", "joined", "normed")
    join = {f"{name}_ptr": "*i64" if name == "token" else "*bf16" for name in joins}
    join |= {"stride_x": "i32", "table_rows": "i32", "table_eps": "fp32", "x_eps": "fp32"}
    constants = {"SIZE": 4096, "BLOCK": 2048, **pdl}
    assert_fits(measure_kernel(joined_norms.join_normed_rows, join, constants, capability, num_warps=4))
    round_rows = {"x_ptr": "*bf16", "norm_ptr": "*bf16", "step_ptr": "*fp32", "stride_x": "i32", "eps": "fp32"}
    for code, float8 in (("*i8", False), ("*u8", True)):
        constants = {"SIZE": 4096, "FLOAT8": float8, "BLOCK": 2048, **pdl}
        arguments = {**round_rows, "code_ptr": code}
        assert_fits(measure_kernel(rowwise.quantize_rows, arguments, constants, capability, num_warps=4))
    parts = {"best_ptr": "*fp32", "index_ptr": "*i32"}
    constants = {"VOCAB": 128256, "BLOCK": 4096, **pdl}
    chunks = {"logits_ptr": "*fp32", **parts}
    assert_fits(measure_kernel(rowwise.best_of_chunks, chunks, constants, capability, num_warps=4))
    blocks = {"token_ptr": "*i64", **parts}
    constants = {"COUNT": 8016, "BLOCK": 1024, **pdl}
    assert_fits(measure_kernel(rowwise.best_of_blocks, blocks, constants, capability, num_warps=4))


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_the_kernel_that_places_chains_compiles_without_spills(capability: int) -> None:
    long, short = ("row", "start", "positions", "mapping"), ("tables", "lengths", "row_tables")
    pointers = {f"{name}_ptr": kind for kind, names in (("*i64", long), ("*i32", short)) for name in names}
    counts = ("num_rows", "num_steps", "num_blocks")
    strides = ("tables_stride", "tables_group", "lengths_stride", "row_tables_group")
    arguments = pointers | dict.fromkeys((*counts, *strides), "i32")
    constants = {"BLOCK_SIZE": 16, "STEPS": chain_inputs.BLOCK_STEPS, "BLOCK": chain_inputs.BLOCK_IDS}
    assert_fits(measure_kernel(chain_inputs.chain_inputs, arguments, constants, capability, num_warps=4))
    del arguments["row_tables_ptr"]
    without = constants | {"row_tables_ptr": None}
    assert_fits(measure_kernel(chain_inputs.chain_inputs, arguments, without, capability, num_warps=4))


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_rotations_compile_without_spills_and_are_not_left_to_units_that_are_off_for_far_positions(
    capability: int,
) -> None:
    tables = dict.fromkeys(("frequencies_ptr", "cos_ptr", "sin_ptr"), "*fp32")
    arguments = {"positions_ptr": "*i64", **tables, "count": "i32", "amplitude": "fp32"}
    cost = measure_kernel(
        rotation.rotations_of_tokens, arguments, {"HALF": 64, "BLOCK": rotation.BLOCK}, capability, num_warps=4
    )
    assert_fits(cost)
    assert "cos.approx" not in cost.ptx and "sin.approx" not in cost.ptx


@pytest.mark.parametrize("rows", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_the_projection_packs_8_bit_keys_without_spills(capability: int, rows: int) -> None:
    assert_fits(compile_op("qkv", MODELS["8B"], rows, capability, store="fp8"))


@pytest.mark.parametrize(("weights", "capability"), only(("fp8", 89), PACKED, SMS))
def test_weights_are_written_out_wide_without_spills(weights: str, capability: int) -> None:
    form = FORMATS[weights]
    arguments = {**form.tensors, "out_ptr": "*bf16"}
    constants: dict[str, Any] = {
        "IN_FEATURES": 4096, "OUT_FEATURES": 4096, "GROUP_SIZE": form.group_size, "LOAD_TILE": form.load_tile,
        "UNPACK_TILE": form.unpack_tile, "TILE_SCALE": form.tile_scale,
        "PDL": capability >= 90, "BLOCK_N": 16, "BLOCK_K": 256,
    }  # fmt: skip
    kernel = kernels.dequantize_tiles
    constants |= {name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in arguments}
    assert_fits(measure_kernel(kernel, arguments, constants, capability, num_warps=4))


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_sums_of_8_bit_products_are_scaled_without_spills(capability: int) -> None:
    arguments = {
        "sum_ptr": "*i32", "step_ptr": "*fp32", "channel_scale_ptr": "*fp32", "bias_ptr": "*fp32", "out_ptr": "*bf16",
    }  # fmt: skip
    constants = {"OUT_FEATURES": 4096, "PDL": capability >= 90, "BLOCK": 1024}
    assert_fits(measure_kernel(kernels.scale_sums, arguments, constants, capability, num_warps=4))


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_sums_of_ranks_load_16_bytes_of_every_part_at_once(capability: int) -> None:
    arguments = {"parts": ("*bf16", "*bf16"), "out_ptr": "*bf16", "size": "i32"}
    constants = {"PDL": capability >= 90, "BLOCK": sums.BLOCK}
    cost = measure_kernel(sums.add_in_order, arguments, constants, capability, num_warps=4)
    assert_fits(cost)
    assert re.findall(r"ld\.global[.\w]*", cost.ptx) == ["ld.global.v4.b32"] * 2


MIXTURE = {"hidden": 2048, "size": 768, "top_k": 8}
"""A model of 30B parameters of which 3B are active."""


def compile_experts(kernel: Any, rows: int, capability: int, weights: str, some: bool = False) -> KernelCost:
    """``some``: of one rank, where others have other experts."""
    ids = {"expert_ptr": "*i64", "out_ptr": "*bf16", "rows_per_x": "i32"}
    if kernel is experts.expert_mix:
        ids |= {"share_ptr": "*fp32", "residual_ptr": "*bf16"}
    elif rows > 1:
        ids |= {"first_ptr": "*i64", "count_ptr": "*i64", "order_ptr": "*i64"}
    gate = kernel is experts.expert_gate
    size = (2 * MIXTURE["size"], MIXTURE["hidden"]) if gate else (MIXTURE["hidden"], MIXTURE["size"])
    if gate:
        ids["norm_ptr"] = "*bf16"
    cut_off = {"LIMIT": 7.0, "ALPHA": 1.702, "OFFSET": 1.0}  # as in gpt-oss
    top_k = MIXTURE["top_k"]
    constants = {"SIZE": MIXTURE["size"], "TOP_K": top_k, "ACT": "silu", "BLOCK_P": top_k, "SOME": some, **cut_off}
    return compile_skinny(kernel, size, rows, capability, weights, ids, constants)


@few(1)
@pytest.mark.parametrize(("weights", "capability"), hopper_or("bf16", ["bf16", "int8", "fp8", "int4", "mxfp4"]))
@pytest.mark.parametrize(
    ("kernel", "rows"),
    [(experts.expert_gate, 1), (experts.expert_mix, 1), (experts.expert_gate, 16), (experts.expert_down, 16)],
    ids=["gate", "mix", "gate of 16", "down of 16"],
)
def test_experts_compile(kernel: Any, rows: int, weights: str, capability: int) -> None:
    assert_fits(compile_experts(kernel, rows, capability, weights), FEW_WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize("weights", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_some_experts_of_a_token_compile_without_spills(weights: str, capability: int) -> None:
    cost = compile_experts(experts.expert_mix, 1, capability, weights, some=True)
    assert_fits(cost, FEW_WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize("weights", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in PACKED)])
@pytest.mark.parametrize("kernel", [pytest.param(experts.expert_gate, marks=pytest.mark.slow), experts.expert_down])
def test_many_rows_of_an_expert_compile_without_spills(kernel: Any, weights: str, capability: int) -> None:
    assert_fits(compile_experts(kernel, GROUPED_ROWS, capability, weights), FEW_WORDS)


ROUTES = {
    "128 experts": {"NUM_EXPERTS": 128, "TOP_K": 8, "SCORES": "softmax", "IN_FEATURES": 2048},
    "32 experts": {"NUM_EXPERTS": 32, "TOP_K": 4, "SCORES": "logits", "IN_FEATURES": 2880},
    "groups": {
        "NUM_EXPERTS": 256, "TOP_K": 8, "SCORES": "sigmoid", "IN_FEATURES": 7168, "GROUPS": 8,
    },
}  # fmt: skip
"""Of Qwen3-30B-A3B, gpt-oss-20b and DeepSeek V3, whose experts eight ranks share out."""


@pytest.mark.parametrize("name", ["groups", *(pytest.param(f"{n} experts", marks=pytest.mark.slow) for n in (128, 32))])
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_experts_are_chosen_without_spills(capability: int, name: str) -> None:
    sizes = ROUTES[name]
    groups, experts_of_all, top_k = sizes.get("GROUPS", 1), sizes["NUM_EXPERTS"], sizes["TOP_K"]
    constants = {
        **sizes, "RENORMALIZE": True, "GROUPS": groups, "CHOSEN_GROUPS": groups // 2 or 1, "BY_TWO": True,
        "BLOCK_G": groups, "BLOCK_S": experts_of_all // groups, "BLOCK_K": top_k, "PDL": capability >= 90,
        "BLOCK": 2048, "own_ptr": None,
    }  # fmt: skip
    floats = ("router_ptr", "bias_ptr", "correction_ptr", "expert_scale_ptr", "logits_ptr", "weight_ptr")
    kinds = {**dict.fromkeys(floats, "*fp32"), "x_ptr": "*bf16", "norm_ptr": "*bf16", "arrived_ptr": "*i32",
             "id_ptr": "*i64", "stride_x": "i32", "eps": "fp32", "scale": "fp32"}  # fmt: skip
    if name == "groups":
        kinds["own_ptr"] = "*i64"
    for kernel, warps in ((routing.choose_experts, 4), (routing.route_rows, 1)):
        arguments = {key: kind for key, kind in kinds.items() if key in kernel.arg_names}
        these = {key: value for key, value in constants.items() if key in kernel.arg_names and key not in kinds}
        title = f"{kernel.__name__} {name}"
        assert_fits(measure_kernel(kernel, arguments, these, capability, name=title, num_warps=warps))


@pytest.mark.parametrize("num_experts", [32, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_pairs_are_sorted_and_mixed_without_spills(capability: int, num_experts: int) -> None:
    numbers = dict.fromkeys(("id_ptr", "order_ptr", "token_ptr", "first_ptr", "count_ptr", "expert_ptr"), "*i64")
    constants = {
        "NUM_EXPERTS": num_experts, "TOP_K": 8, "TILE": 16, "PDL": capability >= 90, "BLOCK": 64,
        "BLOCK_E": num_experts,
    }  # fmt: skip
    arguments = {**numbers, "num_pairs": "i32", "num_tiles": "i32"}
    unaligned = frozenset({"num_pairs", "num_tiles"})
    sizes = {"num_warps": 4, "unaligned": unaligned}
    assert_fits(measure_kernel(experts.sort_pairs, arguments, constants, capability, **sizes))
    arguments = {"made_ptr": "*fp32", "share_ptr": "*fp32", "residual_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {"TOP_K": 8, "OUT_FEATURES": 2048, "PDL": capability >= 90, "BLOCK": 1024}
    for ids in ({"constants": {"id_ptr": None}}, {"arguments": {"id_ptr": "*i64"}}):  # of all experts, of a rank's own
        given = arguments | ids.get("arguments", {}), constants | ids.get("constants", {})
        assert_fits(measure_kernel(experts.mix_rows, *given, capability, num_warps=4))
