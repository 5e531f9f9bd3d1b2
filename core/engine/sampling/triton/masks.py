"""Minus infinity for the tokens that a grammar forbids."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["vocab_size", "num_words", "stride"], do_not_specialize_on_alignment=["word_ptr"])
def mask_logits(logits_ptr, mask_index_ptr, word_ptr, vocab_size, num_words, stride, BLOCK: tl.constexpr):  # fmt: skip
    """Program ``(masked row, block of tokens)``. ``logits_ptr``: float32, rows ``stride`` apart."""
    mask, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab_size
    word = tl.load(word_ptr + mask * num_words + token // 32, mask=real, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    row = tl.load(mask_index_ptr + mask) * stride
    tl.store(logits_ptr + row + token, float("-inf"), mask=real & forbidden)


def mask_on_device(logits: Tensor, index: Tensor, words: Tensor) -> None:
    """``logits``: float32 ``[N, V]``, rows contiguous, changed in place; ``index``: int64 ``[M]``, rows of it;
    ``words``: int32 ``[M, ceil(V / 32)]``, a bit for each token of such a row: 0 forbids it."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and words.is_contiguous()
    mask_logits[(len(index), triton.cdiv(vocab_size, BLOCK))](
        logits, index, words, vocab_size, words.shape[1], logits.stride(0), BLOCK=BLOCK, num_warps=4
    )
