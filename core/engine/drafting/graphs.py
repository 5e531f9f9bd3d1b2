"""Captured drafting: one graph for each shape of a captured step and number of drafts, replayed after the step's.

A graph lets the drafter see the step and propose; its drafts go into the token tables, where the next step finds them.
Nothing is uploaded for it: all follows from what the step's graph was given and left. Rows that are nobody's, and
drafts that a row does not want, are computed and not used.

A batch that is no captured step, such as one with a prompt beside others, and the first step of several that wants more
drafts, are drafted eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.drafter import DeviceDrafter, DraftRows, DraftTokens, TargetStep, may_be_captured
from engine.drafting.metadata import CapturedMetadata
from engine.kernels.metadata import ForwardMetadata
from engine.plugin_guard.calls import quote
from engine.sampling.state import Feature
from engine.step.graphs import Bucket, Capture, CapturedStep, Replay, StepGraphs, query_buckets
from engine.step.plan import DrafterBroken, StepRow
from engine.step.tables import DeviceTables


@dataclass(frozen=True, slots=True, order=True)
class DraftBucket:
    """What follows a step of some shape: drafts of so many tokens a row."""

    step: Bucket
    num_draft_tokens: int
    sampled: bool = False
    """Drafts are drawn where requests are sampled; else all are the most likely tokens."""

    @property
    def tokens(self) -> int:
        """Most tokens that are computed at once."""
        return max(self.step.tokens, self.step.rows * (self.num_draft_tokens + 1))


def draft_counts(step: Bucket, max_width: int) -> tuple[int, ...]:
    """Numbers of drafts worth a graph after a step, ascending: as many as it verifies, for that number seldom changes;
    after one that verifies nothing, any that fill the shape of a later step; after a prompt the most."""
    if step.prompt:
        return (max_width,)
    return (step.queries - 1,) if step.queries > 1 else tuple(n - 1 for n in query_buckets(max_width) if n > 1)


def draft_buckets(drafter: DeviceDrafter | None, steps: Iterable[Bucket]) -> list[DraftBucket]:
    """What may follow captured steps: nothing with a drafter that cannot be captured."""
    if drafter is None or not may_be_captured(drafter):
        return []
    shapes = [(step, count) for step in steps for count in draft_counts(step, drafter.max_width)]
    return [DraftBucket(*shape, sampled) for shape in shapes for sampled in (False, True)]


class NotCapturable(RuntimeError):
    """A drafter does what cannot be captured, although it says ``capturable``."""


class DraftGraphs:
    """The registry."""

    def __init__(self, drafter: DeviceDrafter, steps: StepGraphs, capture: Capture) -> None:
        """``steps``: captured already, with the same ``capture``."""
        self._drafter = drafter
        self._steps = steps
        self._capture: Capture | None = capture
        todo = draft_buckets(drafter, steps.buckets)
        self._todo = sorted(todo, key=lambda found: (-found.tokens, -found.step.tokens, -found.num_draft_tokens, found))
        self._graphs: dict[DraftBucket, Replay] = {}
        self._by_step: dict[Bucket, list[DraftBucket]] = {}
        """Fewest drafts first."""
        self._valid = torch.ones((), dtype=torch.bool, device=steps.tables.device)
        self._block_tables: dict[tuple[int, int], Tensor] = {}
        self._metadata: list[CapturedMetadata] = []
        """Kept for the graphs, which read their memory."""

    @property
    def buckets(self) -> tuple[DraftBucket, ...]:
        """Captured, in order."""
        return tuple(sorted(self._graphs))

    def capture(self, on_progress: Callable[[float, str], None] = lambda fraction, what: None) -> None:
        """Capture every graph. Once. Raises :class:`NotCapturable`."""
        capture, self._capture = self._capture, None
        assert capture is not None, "graphs are captured once, before the engine is ready"
        for done, found in enumerate(self._todo):
            on_progress(done / len(self._todo), f"{found.step}, {found.num_draft_tokens} drafts")
            self._graphs[found] = self._graph(found, capture)
        for found in self.buckets:
            self._by_step.setdefault(found.step, []).append(found)

    def find(self, step: Bucket, rows: Sequence[StepRow]) -> DraftBucket | None:
        """The graph that follows a step of these rows: the smallest that drafts all that is wanted, if any."""
        wanted, sampled = max(row.wants_drafts for row in rows), Feature.SAMPLED in self._steps.tables.features(rows)
        fitting = (b for b in self._by_step.get(step, ()) if b.num_draft_tokens >= wanted > 0 and b.sampled == sampled)
        return next(fitting, None)

    @torch.inference_mode()
    def replay(self, found: DraftBucket) -> Tensor:
        """Draft after the step that has just been replayed; the drafts go into the tables. Returns whether all of them
        are tokens, bool on the device, good until the next replay. Nothing here waits."""
        self._graphs[found]()
        return self._valid

    def _graph(self, found: DraftBucket, capture: Capture) -> Replay:
        captured, drafter, tables = self._steps.captured(found.step), self._drafter, self._steps.tables
        metadata = CapturedMetadata(tables, captured.batch.attention, self._steps.attention, self._lend)
        self._metadata.append(metadata)

        def follow() -> None:
            metadata.begin()
            drafter.extend(target_step(captured, tables))
            rows = draft_rows(captured, tables, found, metadata)
            self._valid.copy_(tables.write_drafts(rows.row_ids, rows.positions, propose(drafter, rows)))

        try:
            with torch.inference_mode():
                return capture(follow)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotCapturable(f"says capturable, but its capture failed: {error}") from error

    def _lend(self, call: int, group: int, count: int) -> Tensor:
        """Block tables of a KV group for ``count`` rows and the ``call``-th call of a pass, in memory that all graphs
        share, as far as the first to ask wanted as many."""
        found = self._block_tables.get((call, group))
        if found is None or len(found) < count:
            blocks = self._steps.tables.block_tables
            found = self._block_tables[call, group] = blocks.new_zeros(count, blocks.shape[2])
        return found[:count]


def target_step(captured: CapturedStep, tables: DeviceTables) -> TargetStep:
    """What a captured step leaves, as drafters see it."""
    batch = captured.batch
    return TargetStep(
        tokens=batch.token_ids,
        next_tokens=tables.tokens[batch.row_ids, batch.positions + 1].clamp(min=0),
        positions=batch.positions,
        q_lens=batch.attention[0].q_lens,
        row_ids=batch.row_ids,
        aux_hidden_states=captured.aux_hidden_states,
        metadata=ForwardMetadata(batch.positions, batch.slot_mappings, batch.attention, captured.prepared),
        drafts_follow=True,
    )


def draft_rows(
    captured: CapturedStep, tables: DeviceTables, wanted: DraftBucket, metadata: CapturedMetadata
) -> DraftRows:
    """The rows of a captured step, with the drafts of ``wanted`` for each; what is known of them is on the device."""
    rows, queries, row_ids = captured.bucket.rows, captured.bucket.queries, captured.inputs[0]
    last = captured.last + torch.arange(0, rows * queries, queries, device=row_ids.device)
    positions = captured.starts + captured.last + 1
    return DraftRows(
        index=tuple(range(rows)),
        row_ids=row_ids,
        last=last,
        tokens=tables.tokens[row_ids, positions],
        positions=positions,
        lengths=(),
        num_draft_tokens=(wanted.num_draft_tokens,) * rows,
        sampled=wanted.sampled,
        capture=metadata,
    )


def propose(drafter: DeviceDrafter, rows: DraftRows) -> Tensor:
    """What a drafter proposes: int64 ``[num_rows, rows.most_draft_tokens]``. Raises :class:`DrafterBroken` for anything
    else than was asked for: the tables would keep what nobody drafted."""
    drafted, count = drafter.propose(rows), len(rows.index)
    if not isinstance(drafted, DraftTokens) or not isinstance(drafted.tokens, Tensor):
        raise DrafterBroken(f"returned {quote(drafted)}, expected DraftTokens of a tensor")
    tokens, device = drafted.tokens, rows.row_ids.device
    shape = tuple(tokens.shape)
    if len(shape) != 2 or shape[0] != count or shape[1] < rows.most_draft_tokens:
        raise DrafterBroken(
            f"proposed tokens {list(shape)}, expected {count} rows of at least {rows.most_draft_tokens}"
        )
    if tokens.dtype != torch.int64 or tokens.device != device:
        raise DrafterBroken(f"proposed {tokens.dtype} on {tokens.device}, expected torch.int64 on {device}")
    return tokens[:, : rows.most_draft_tokens]
