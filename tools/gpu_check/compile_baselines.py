"""Fills the compile caches of the baselines, so that compiling them takes no time from the section that measures them.

What fails here fails there again, and is reported there.
"""

from __future__ import annotations

import time

import torch

from gpu_check.contestants import Compiled, Transformers
from gpu_check.section import Context, Row
from gpu_check.shapes import SHAPES, parts
from gpu_check.speed import BATCHES, context_tokens


def run(context: Context) -> None:
    name = context.section.argument
    shape, tokens, started = SHAPES[name], context_tokens(False), time.monotonic()
    weights = {key: tensor for part in parts(shape, torch.bfloat16, context.device) for key, tensor in part.items()}
    for batch in BATCHES:
        Compiled(shape, weights, batch, tokens)
        torch.cuda.empty_cache()
    context.emit(Row(f"{name}: plain torch compiled", round(time.monotonic() - started, 1), "s"))
    started = time.monotonic()
    Transformers(shape, weights, 1, tokens)
    context.emit(Row(f"{name}: transformers compiled", round(time.monotonic() - started, 1), "s"))
