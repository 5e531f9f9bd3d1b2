"""What a step computes, as numbers that its time depends on, and whose prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.contracts.events import MAX_CHUNKS, Chunk
from engine.contracts.step_cost import NO_WORK, StepWork
from engine.loop.sequence import Sequence
from engine.step.plan import StepRow


@dataclass(frozen=True, slots=True)
class StepContents:
    """Of one step. A row decodes if it computes its last known token, and that is no prompt token; drafts that are
    verified with it count as its tokens."""

    work: StepWork = NO_WORK
    decode_tokens: int = 0
    chunks: tuple[Chunk, ...] = ()
    """The rows that do not decode, at most :data:`MAX_CHUNKS`, the largest first."""


NO_CONTENTS = StepContents()


def contents_of(rows: Iterable[tuple[StepRow, Sequence]]) -> StepContents:
    """Of rows and whose they are."""
    num_rows = num_tokens = num_drafts = decode_tokens = decode_context = prefill_context = 0
    chunks: list[Chunk] = []
    for row, sequence in rows:
        num_rows += 1
        num_tokens += row.num_queries
        num_drafts += row.num_drafts
        count, context = row.num_tokens, row.max_start
        if count == 1 and row.samples and context >= sequence.prompt_len:
            decode_tokens += row.num_queries
            decode_context += row.max_end
        else:
            prefill_context += count * context + count * (count + 1) // 2
            chunks.append(Chunk(sequence.request_id, count, context))
    chunks.sort(key=lambda chunk: -chunk.num_tokens)
    work = StepWork(num_rows, num_tokens, decode_context, prefill_context, num_drafts)
    return StepContents(work, decode_tokens, tuple(chunks[:MAX_CHUNKS]))
