"""The sampling kernels compile for real GPUs without spilling a register. No GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
import triton

from engine.sampling.triton import columns, masks
from engine.sampling.triton.border import find_border
from engine.sampling.triton.columns import gather_columns
from engine.sampling.triton.draw import draw
from engine.sampling.triton.masks import mask_logits
from engine.sampling.triton.penalties import HISTORY_BLOCK, apply_penalties
from engine.sampling.triton.sampler import PROBES, SEARCH_BLOCK, SEARCH_WARPS
from engine.sampling.triton.survey import survey
from engine.sampling.triton.tensors import CHUNK, LIST_LENGTH
from engine.testing.aot import SHARED_LIMIT, measure_kernel
from tests.selection import few

VOCAB = 128256
CHUNKS = -(-VOCAB // CHUNK)
TYPES = {
    "logits_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp32",
    "best_ptr": "*fp32", "index_ptr": "*i32", "mass_ptr": "*fp32", "facts_ptr": "*fp32", "arrived_ptr": "*i32",
    "token_ptr": "*i64", "capacity": "i32", "stride": "i32", "listed_ptr": "*fp32", "length_ptr": "*i32",
    "seed_ptr": "*i64", "position_ptr": "*i64", "history_ptr": "*i64", "row_ptr": "*i64", "ids_ptr": "*i64",
    "prompt_len_ptr": "*i64", "repetition_ptr": "*fp32", "presence_ptr": "*fp32", "frequency_ptr": "*fp32",
    "stride_logits": "i32", "stride_history": "i32", "float_ptr": "*fp32", "int_ptr": "*i64", "floats_ptr": "*fp32",
    "mask_index_ptr": "*i64", "word_ptr": "*i32", "vocab_size": "i32", "num_words": "i32",
    "top_ps_ptr": "*fp64", "ints_ptr": "*i64", "output_ptr": "*i64", "count": "i32", "num_rows": "i32",
}  # fmt: skip
CONSTANTS = {
    "VOCAB": VOCAB, "CHUNK": CHUNK, "CHUNKS": CHUNKS, "LANES": triton.next_power_of_2(CHUNKS),
    "LIST_LENGTH": LIST_LENGTH, "PROBES": PROBES, "BLOCK": SEARCH_BLOCK,
}  # fmt: skip
GREEDY = dict.fromkeys(("ids_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"))
VARIANTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (survey, {"FILTERED": False, "BROKEN": -1, **GREEDY}), (survey, {"FILTERED": True, "BROKEN": -1}),
    (find_border, {}),
    (draw, {"ids_ptr": None}), (draw, {}), (apply_penalties, {"BLOCK": HISTORY_BLOCK}),
    (mask_logits, {"BLOCK": masks.BLOCK}),
    (gather_columns, {"FLOATS": 5, "INTS": 4, "PROMPT_LEN": 2, "BLOCK": columns.BLOCK}),
)  # fmt: skip
IDS = [" ".join((kernel.__name__, *(f"{name}={value}" for name, value in v.items()))) for kernel, v in VARIANTS]


@few(2)
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), pytest.param(89, marks=pytest.mark.slow), 90]
)
@pytest.mark.parametrize(("kernel", "variant"), VARIANTS, ids=IDS)
def test_no_register_is_spilled(kernel: Any, variant: dict[str, Any], capability: int) -> None:
    constants = {**CONSTANTS, "PDL": capability >= 90, **variant}
    names = kernel.arg_names
    aligned = {"logits_ptr", "listed_ptr", "stride", "stride_logits"}
    cost = measure_kernel(
        kernel,
        {name: TYPES[name] for name in names if name in TYPES and name not in variant},
        {name: constants[name] for name in names if name in constants},
        capability,
        unaligned=frozenset(names) - aligned,
        num_warps=SEARCH_WARPS if kernel is find_border else 4, enable_fp_fusion=False, launch_pdl=capability >= 90,
    )  # fmt: skip
    print(cost)
    assert cost.spill_stores == cost.spill_loads == 0, cost
    assert cost.shared <= SHARED_LIMIT[capability], cost
