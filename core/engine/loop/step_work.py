"""What a step computes, as numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.contracts.events import MAX_CHUNKS, Chunk
from engine.loop.sequence import Sequence
from engine.step.plan import StepRow


@dataclass(frozen=True, slots=True)
class StepWork:
    """Of one step. A row decodes if it computes its last known token, and that is no prompt token; drafts that are
    verified with it count as its tokens."""

    decode_tokens: int
    decode_context: int
    """Tokens whose keys and values the rows that decode read, added up."""
    prefill_context: int
    """For each token of the other rows, the tokens it attends to, added up."""
    chunks: tuple[Chunk, ...]
    """The other rows, at most :data:`MAX_CHUNKS`, the largest first."""


def work_of(rows: Iterable[tuple[StepRow, Sequence]]) -> StepWork:
    """Of rows and whose they are."""
    decode_tokens = decode_context = prefill_context = 0
    chunks: list[Chunk] = []
    for row, sequence in rows:
        count, context = row.num_tokens, row.max_start
        if count == 1 and row.samples and context >= sequence.prompt_len:
            decode_tokens += row.num_queries
            decode_context += row.max_end
        else:
            prefill_context += count * context + count * (count + 1) // 2
            chunks.append(Chunk(sequence.request_id, count, context))
    chunks.sort(key=lambda chunk: -chunk.num_tokens)
    return StepWork(decode_tokens, decode_context, prefill_context, tuple(chunks[:MAX_CHUNKS]))
