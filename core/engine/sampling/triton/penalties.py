"""Repetition, presence and frequency penalties from the token history on the device, in place, in one launch.

A program owns a chunk of one row's vocabulary and counts the history's tokens that fall into it, so every logit is
changed once, by one program, however often its token occurs; nothing of the vocabulary's size is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device import has_dependent_launch
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine.sampling.state import SamplingBatch
from engine.sampling.triton.tensors import CHUNK

HISTORY_BLOCK = 1024


def penalise_on_device(logits: Tensor, batch: SamplingBatch, text: Tensor) -> None:
    """Change ``logits`` (float32 ``[N, V]``, rows contiguous) as :func:`engine.sampling.adjust.adjust_` would.

    ``text``: int64 ``[rows, positions]``, prompt, output and after them the drafts to be verified. Ids outside the
    vocabulary are ignored. No synchronisation; may be captured in a CUDA graph.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert text.dtype == torch.int64 and text.stride(1) == 1
    pdl = has_dependent_launch(logits.device.type)
    apply_penalties[(rows, triton.cdiv(vocab, CHUNK))](
        logits, text, batch.rows, batch.prompt_len, batch.positions,
        batch.repetition, batch.presence, batch.frequency, logits.stride(0), text.stride(0),
        VOCAB=vocab, CHUNK=CHUNK, BLOCK=HISTORY_BLOCK, PDL=pdl,
        num_warps=4, enable_fp_fusion=False, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["stride_history"],
    do_not_specialize_on_alignment=[
        "history_ptr", "row_ptr", "prompt_len_ptr", "position_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr",
    ],
)  # fmt: skip
def apply_penalties(
    logits_ptr, history_ptr, row_ptr, prompt_len_ptr, position_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    stride_logits, stride_history,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(row, chunk of the vocabulary)``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row, first = tl.program_id(0), tl.program_id(1) * CHUNK
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    text = history_ptr + tl.load(row_ptr + row) * stride_history
    prompt_len, end = tl.load(prompt_len_ptr + row), tl.load(position_ptr + row) + 1
    occurred = tl.zeros([CHUNK], tl.int32)
    produced = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, end.to(tl.int32), BLOCK):
        position = begin + tl.arange(0, BLOCK)
        token = tl.load(text + position, mask=position < end, other=-1)
        mine = (token >= first) & (token < first + CHUNK)
        bucket = tl.where(mine, token - first, 0).to(tl.int32)
        occurred += tl.histogram(bucket, CHUNK, mask=mine)
        produced += tl.histogram(bucket, CHUNK, mask=mine & (position >= prompt_len))
    at = first + tl.arange(0, CHUNK)
    logit_ptr = logits_ptr + row.to(tl.int64) * stride_logits + at
    changed = (occurred > 0) & (at < VOCAB)
    x = tl.load(logit_ptr, mask=changed, other=0.0)
    x = tl.where(x > 0.0, tl.math.div_rn(x, repetition), x * repetition)
    x = x - frequency * produced.to(tl.float32)
    x = x - presence * (produced > 0).to(tl.float32)
    tl.store(logit_ptr, x, mask=changed)
