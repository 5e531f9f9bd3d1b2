"""What a drafting head reads of tokens and hidden states, in one launch: the normed embedding of each token beside its
normed hidden state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch, NormWeight
from engine.kernels.triton.rowwise import norm_row
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input


@triton.jit(do_not_specialize_on_alignment=["token_ptr"])
def join_normed_rows(
    token_ptr, table_ptr, x_ptr, table_norm_ptr, x_norm_ptr, joined_ptr, normed_ptr,
    stride_x, table_rows, table_eps, x_eps,
    SIZE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ``(row, half)``: half 0 norms a row of the table, half 1 one of ``x``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    joined_ptr += row * 2 * SIZE
    if tl.program_id(1) == 0:
        entry = row
        if token_ptr is not None:  # nothing outside of the table is read, whatever the token
            entry = tl.minimum(tl.maximum(tl.load(token_ptr + row), 0), table_rows - 1)
        norm_row(table_ptr + entry * SIZE, table_norm_ptr, joined_ptr, None, table_eps, SIZE, BLOCK)
    else:
        norm_row(x_ptr + row * stride_x, x_norm_ptr, joined_ptr + SIZE, normed_ptr + row * SIZE, x_eps, SIZE, BLOCK)


def joined_norms(
    tokens: Tensor | None, table: Tensor, x: Tensor, norms: tuple[NormWeight, NormWeight], launch: Launch
) -> tuple[Tensor, Tensor]:
    """``norm(table[tokens])`` beside ``norm(x)``, ``[rows, 2 * size]``, and ``norm(x)`` by itself, ``[rows, size]``.

    ``tokens``: int64 ``[rows]``, ``None`` for the rows of ``table`` as they are; ``table``: ``[entries, size]``,
    contiguous; ``x``: ``[rows, size]`` of its dtype, whose rows may lie apart; ``norms``: of the table's rows, of
    ``x``.
    """
    assert table.is_contiguous() and x.stride(1) == 1 and table.dtype == x.dtype
    assert tokens is None or tokens.is_contiguous()
    rows, size = x.shape
    joined = torch.empty(rows, 2 * size, dtype=x.dtype, device=x.device)
    normed = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    (of_table, of_x), block = norms, min(2048, triton.next_power_of_2(size))
    join_normed_rows[(rows, 2)](
        tokens, table, x, of_table.weight, of_x.weight, joined, normed,
        x.stride(0), table.shape[0], of_table.eps, of_x.eps, SIZE=size, BLOCK=block, **launch.options(4),
    )  # fmt: skip
    return joined, normed
