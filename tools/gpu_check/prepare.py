"""Random weights for the sections that measure; written beside the checks of correctness, so it takes no extra time."""

from __future__ import annotations

import time

import torch

from gpu_check.draft_head import HeadShape, write_head
from gpu_check.section import Context, Row
from gpu_check.shapes import SHAPES, folder_of, head_folder_of, shape_of, write

WITH_HEAD = "8b"


def run(context: Context) -> None:
    dtype = torch.float32 if context.dry_run else torch.bfloat16
    for name in ["1b"] if context.dry_run else list(SHAPES):
        started = time.monotonic()
        write(shape_of(name, context.dry_run), folder_of(name, context.scratch), dtype, context.device)
        if context.dry_run or name == WITH_HEAD:
            head = HeadShape(shape_of(name, context.dry_run))
            write_head(head, head_folder_of(name, context.scratch), dtype, context.device)
        context.emit(Row(f"{name}: weights made and written", round(time.monotonic() - started, 1), "s"))
