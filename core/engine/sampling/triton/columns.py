"""The sampling parameters of a step's positions, gathered from the device tables in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device import has_dependent_launch
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input

BLOCK = 64


@triton.jit(
    do_not_specialize=["count", "num_rows"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"]
)  # fmt: skip
def gather_columns(
    row_ptr, position_ptr, float_ptr, top_p_ptr, int_ptr, floats_ptr, top_ps_ptr, ints_ptr, output_ptr, count, num_rows,
    FLOATS: tl.constexpr, INTS: tl.constexpr, PROMPT_LEN: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``block of positions``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    row = tl.load(row_ptr + at, mask=real, other=0)
    for column in tl.static_range(FLOATS):
        value = tl.load(float_ptr + column * num_rows + row, mask=real, other=0.0)
        tl.store(floats_ptr + column * count + at, value, mask=real)
    tl.store(top_ps_ptr + at, tl.load(top_p_ptr + row, mask=real, other=1.0), mask=real)
    for column in tl.static_range(INTS):
        number = tl.load(int_ptr + column * num_rows + row, mask=real, other=0)
        tl.store(ints_ptr + column * count + at, number, mask=real)
    position = tl.load(position_ptr + at, mask=real, other=0)
    prompt_len = tl.load(int_ptr + PROMPT_LEN * num_rows + row, mask=real, other=0)
    tl.store(output_ptr + at, position + 1 - prompt_len, mask=real)


def gathered_columns(
    rows: Tensor, positions: Tensor, floats: Tensor, top_p: Tensor, ints: Tensor, prompt_len: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``floats`` (float32 ``[columns, num_rows]``), ``top_p`` (float64 ``[num_rows]``) and ``ints`` (int64
    ``[columns, num_rows]``) at ``rows``, int64 ``[N]``: ``[columns, N]``, ``[N]``, ``[columns, N]``; and tokens after
    the prompt, ``positions + 1 - ints[prompt_len]``, int64 ``[N]``."""
    count, device = len(rows), rows.device
    rows, positions = rows.contiguous(), positions.contiguous()
    made = (
        torch.empty(len(floats), count, dtype=floats.dtype, device=device),
        torch.empty(count, dtype=top_p.dtype, device=device),
        torch.empty(len(ints), count, dtype=ints.dtype, device=device),
        torch.empty(count, dtype=torch.int64, device=device),
    )
    pdl = has_dependent_launch(device.type)
    gather_columns[(max(1, triton.cdiv(count, BLOCK)),)](
        rows, positions, floats, top_p, ints, *made, count, floats.shape[1],
        FLOATS=len(floats), INTS=len(ints), PROMPT_LEN=prompt_len, PDL=pdl, BLOCK=BLOCK,
        num_warps=2, enable_fp_fusion=True, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return made
