"""What a captured step leaves for the next one, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["accepted_ptr"])
def step_outputs(
    inputs_ptr, ids_ptr, positions_ptr, chosen_ptr, kept_ptr, accepted_ptr, tokens_ptr, computed_ptr,
    tokens_stride, num_rows, nobody,
    QUERIES: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Program ``row``: counts the drafts that equal the chosen tokens before them, and writes what follows from it."""
    row = tl.program_id(0)
    row_id, num_drafts = tl.load(inputs_ptr + row), tl.load(inputs_ptr + num_rows + row)
    start = tl.load(positions_ptr + row * QUERIES)
    query = tl.arange(0, BLOCK_Q)
    real, at = query < QUERIES, row * QUERIES + query
    chosen = tl.load(chosen_ptr + at, mask=real, other=-1)
    draft = tl.load(ids_ptr + at + 1, mask=query + 1 < QUERIES, other=-2)  # after this query's token
    accepted = tl.min(tl.where((draft == chosen) & (query < num_drafts), BLOCK_Q, query), 0)
    tl.store(kept_ptr + at, chosen, mask=real)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    # A broken row's -1 becomes 0: the step after it must find a token to embed.
    tl.store(tokens_ptr + row_id * tokens_stride + start + 1 + query, tl.maximum(chosen, 0), mask=real)
    tl.store(computed_ptr + row_id, tl.where(row_id == nobody, 0, start + 1 + accepted))


def settle_step(
    inputs: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    chosen: Tensor,
    kept: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    computed: Tensor,
    nobody: int,
) -> None:
    """Accept drafts and move rows on, for ``rows`` times ``queries`` tokens.

    ``inputs``: int64 ``[2, rows]``, each row's id and number of drafts (of one query there are none, whatever this
    says); ``token_ids``, ``positions`` and ``chosen``: int64 ``[rows * queries]``, the tokens after which one is
    chosen, where they are, and the target's token after each (-1: broken).
    Written: ``kept`` (like ``chosen``) and ``accepted`` (int64 ``[rows]``); of the device tables ``tokens`` (int64
    ``[rows, positions]``) after each row's first token, and ``computed`` (int64 ``[rows]``), which stays 0 for the row
    ``nobody``.
    """
    rows = inputs.shape[1]
    queries = token_ids.shape[0] // rows
    step_outputs[(rows,)](
        inputs, token_ids, positions, chosen, kept, accepted, tokens, computed, tokens.stride(0), rows, nobody,
        QUERIES=queries, BLOCK_Q=triton.next_power_of_2(queries), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
