"""The Triton attention kernels compile for real GPUs, within their registers and shared memory. No GPU needed."""

from __future__ import annotations

import re

import pytest
import triton
from tests.selection import few
from tools.machine_code.attention import CACHES, compile_attention, row_of
from tools.machine_code.sass import MachineCode, disassembled

from engine.testing.aot import SHARED_LIMIT, KernelCost
from engine_plugins.attention_kernel.triton.planning import MAX_SPLITS

HOPPER_FIRST = [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 89))]
"""Attention compiles for Hopper in every run, to the keys of one rank for 8.9, and to 8-bit caches for 8.0, which does
not convert them itself; the rest of the product on demand."""
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
"""A release whose assembler spills a few words more."""


def decode_spills(capability: int) -> int:
    """Bytes. The assembler of older Triton releases spills up to four words before Hopper to reach the next step of
    occupancy, although registers are left."""
    return 16 if OLD and capability < 90 else 0


def assert_fits(cost: KernelCost, spills: int = 0) -> None:
    print(cost)
    assert cost.shared <= SHARED_LIMIT[cost.capability], cost
    assert cost.spill_stores <= spills and cost.spill_loads <= spills, cost


@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize("wide", [{}, pytest.param({"block_m": 32, "splits": 16}, marks=pytest.mark.slow)])
def test_the_decode_path_compiles_without_spills(wide: dict[str, int], capability: int) -> None:
    assert_fits(compile_attention("decode", 128, capability, **wide), decode_spills(capability))


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_the_prefill_path_compiles_without_spills(capability: int) -> None:
    for head_dim in (64, 128):
        assert_fits(compile_attention("prefill", head_dim, capability))


@pytest.mark.slow
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_latent_attention_compiles_without_spills(capability: int) -> None:
    """Keys of 512 + 64 numbers, of which the first 512 are the value too."""
    latent = {"value_dim": 512, "block_size": 64}
    for block_m in (16, 32):
        assert_fits(compile_attention("decode", 576, capability, block_m=block_m, splits=16, **latent))
    if capability == 90:
        assert_fits(compile_attention("prefill", 576, capability, **latent))


@pytest.mark.parametrize("window", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_sinks_compile_without_spills(capability: int, window: bool) -> None:
    """Eight heads of 64 a key-value head, with a window and without."""
    assert_fits(compile_attention("decode", 64, capability, sinks=True, window=window))


OF_ONE_RANK = [
    *(("decode", capability) for capability in (80, 90)),
    ("prefill", 90),
    *(("latent", c) for c in (80, 89, 90)),
]


@pytest.mark.parametrize(
    ("path", "capability"), [("decode", 89), *(pytest.param(*one, marks=pytest.mark.slow) for one in OF_ONE_RANK)]
)
def test_attention_to_the_keys_of_one_rank_compiles_without_spills(path: str, capability: int) -> None:
    if path == "latent":
        latent = {"value_dim": 512, "block_size": 64, "block_m": 32, "splits": 16}
        assert_fits(compile_attention("decode", 576, capability, shared=True, **latent))
    else:
        assert_fits(compile_attention(path, 128, capability, shared=True), decode_spills(capability))


TILES = {"unsplit": (16, 1), "split": (16, MAX_SPLITS), "wide": (32, 16)}
"""Queries of a tile, and the number of splits."""


@few(1)
@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("cache", "tile"),
    [
        ("int8", "split"), ("fp8", "wide"),
        *(pytest.param("int8", tile, marks=pytest.mark.slow) for tile in ("unsplit", "wide")),
        *(pytest.param("fp8", tile, marks=pytest.mark.slow) for tile in ("unsplit", "split")),
    ],
)  # fmt: skip
def test_8_bit_caches_are_decoded_without_spills(cache: str, tile: str, capability: int) -> None:
    """Before Hopper up to four words outside of the loop may spill, to reach the next step of occupancy."""
    block_m, splits = TILES[tile]
    cost = compile_attention("decode", 128, capability, block_m=block_m, splits=splits, cache=cache)
    assert_fits(cost, spills=16 if OLD or capability < 90 else 0)


@pytest.mark.skipif(OLD, reason="older compilers emit others")
@few(1)
@pytest.mark.parametrize("cache", CACHES)
def test_8_bit_caches_are_decoded_in_few_instructions_and_no_single_bytes(cache: str) -> None:
    """Above 6.6 for each cached number an H200 issues more slowly than it reads."""
    row = row_of("decode", 128, 90, cache)
    assert row.narrow_reads == 0, row
    assert row.instructions_per_weight is not None and row.instructions_per_weight <= 5.3, row


@few(1)
@pytest.mark.parametrize("capability", HOPPER_FIRST)
@pytest.mark.parametrize("cache", CACHES)
def test_8_bit_caches_serve_prompts_without_spills(cache: str, capability: int) -> None:
    """Older compilers spill outside of loops."""
    cost = compile_attention("prefill", 128, capability, cache=cache)
    assert_fits(cost, spills=64 if OLD else 0)
    in_loops = [one for loop in MachineCode(disassembled(cost.cubin)).loops for one in loop]
    assert OLD or not any(one.kind in ("LDL", "STL") or (one.kind == "LDS" and one.width == 1) for one in in_loops)


def test_the_last_program_acquires_what_the_others_released_and_reads_it_past_its_own_cache() -> None:
    """One atomic, between a barrier of the program's stores and loads that go to the L2."""
    ptx = compile_attention("decode", 128, 90).ptx
    (arrival,) = re.finditer(r"atom\.(?=\S*acq_rel)(?=\S*gpu)\S*add\S*", ptx)
    before, after = ptx[: arrival.start()], ptx[arrival.end() :]
    between = before[before.rindex("st.global") :]
    assert "bar.sync" in between or "barrier.sync" in between
    assert "ld.global.cg" in after and "ld.global.cg" not in before
    assert not re.search(r"ld\.global(?!\.cg)", after[: after.rindex("ld.global.cg")])


def test_dependents_start_first_and_only_where_tokens_are_is_read_before_the_wait() -> None:
    ptx = compile_attention("decode", 128, 90).ptx
    early, late = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
    assert early < late and "ld.global" not in ptx[:early]
    assert ptx[early:late].count("ld.global") == 6, "a tile, a row's queries and its keys, and the first blocks"
    assert "prefetch.global.L2" in ptx[early:late] and "prefetch" not in ptx[late:]
    assert "st.global" not in ptx[:late] and "ret;" not in ptx[:late]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_decode_variant_compiles_without_spills(head_dim: int, capability: int) -> None:
    """Tiles of 64 queries serve chunks, not decode; before Hopper a few words of theirs may spill, as in prefill."""
    few = decode_spills(capability)
    for block_m, spills in ((16, few), (32, few), (64, 0 if capability >= 90 else 160)):
        # Only the tiles of 16 queries are split further than 16 times.
        for splits in (1, 16, MAX_SPLITS) if block_m == 16 else (1, 16):
            assert_fits(compile_attention("decode", head_dim, capability, block_m=block_m, splits=splits), spills)
    assert_fits(compile_attention("decode", head_dim, capability, window=True, cap=True), few)
    assert_fits(compile_attention("decode", head_dim, capability, block_size=64), few)
    assert_fits(compile_attention("decode", head_dim, capability, dtype="fp16"), few)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_prefill_variant_compiles(head_dim: int, capability: int) -> None:
    """Before Hopper the accumulator and the fragments share 255 registers; a few words may spill."""
    spills = 0 if capability >= 90 else 160
    for window, cap in ((False, False), (True, False), (False, True)):
        assert_fits(compile_attention("prefill", head_dim, capability, window=window, cap=cap), spills)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_float32_compiles(capability: int) -> None:
    for head_dim in (64, 128):
        for kind in ("decode", "prefill"):
            assert_fits(compile_attention(kind, head_dim, capability, dtype="fp32"), spills=64)
    for kind in ("decode", "prefill"):
        assert_fits(compile_attention(kind, 576, capability, dtype="fp32", value_dim=512, splits=16), spills=64)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_other_variants_of_sinks_and_latent_attention_compile(capability: int) -> None:
    few = 0 if capability >= 90 else 160
    for window in (False, True):
        assert_fits(compile_attention("prefill", 64, capability, sinks=True, window=window), few)
    for splits in (1, 16):
        assert_fits(compile_attention("decode", 64, capability, sinks=True, block_m=32, splits=splits), few)
    for stored in CACHES:
        for block_m in (16, 32):
            tile = {"block_m": block_m, "splits": 16, "cache": stored, "value_dim": 512, "block_size": 64}
            assert_fits(compile_attention("decode", 576, capability, **tile))
    assert_fits(compile_attention("prefill", 576, capability, value_dim=512, block_size=64))
