"""Recorded drafting: one graph for each shape of a recorded step and each width, replayed right behind the step's.

A graph finds on the device which drafts stand, tells the drafter of the step and has it propose; its drafts are left
in memory that stays, so that the host fetches the step's tokens and the next drafts at once. Nothing is uploaded for
it: all follows from what the step's recording was given and left. Rows that are nobody's, and drafts that a row does
not want, are computed and not used.

A step whose tokens the host chooses (rejection sampling) cannot be followed this way; it comes of drafters that give
probabilities, which are never recorded (:func:`engine.contracts.drafter.may_be_recorded`). A batch that is no recorded
step, such as one with a prompt, and the first step of several that wants more drafts, are drafted behind op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.drafter import DeviceDrafter, DraftRows, DraftTokens, TargetStep, may_be_recorded
from engine.execution.graphs import Bucket, Capture, Recorded, Replay, StepGraphs, query_buckets
from engine.execution.places import Place, RecordedPlaces
from engine.execution.step import StepRow
from engine.execution.verify import standing_drafts


@dataclass(frozen=True, slots=True, order=True)
class DraftBucket:
    """What follows a step of some shape: drafts of so many tokens a row, 0 for none."""

    step: Bucket
    width: int

    @property
    def tokens(self) -> int:
        """Most tokens that are computed at once."""
        return max(self.step.tokens, self.step.rows * (self.width + 1))


def draft_widths(queries: int, max_width: int) -> tuple[int, ...]:
    """Widths worth a graph behind a step of so many tokens a row, ascending: none, and as many drafts as it verifies,
    for widths seldom change; behind one that verifies nothing, any that fill the shape of a later step."""
    drafts = (queries - 1,) if queries > 1 else tuple(n - 1 for n in query_buckets(max_width))
    return tuple(sorted({0, *drafts}))


def draft_buckets(drafter: DeviceDrafter | None, steps: Iterable[Bucket]) -> list[DraftBucket]:
    """What may follow recorded steps: nothing with a drafter that cannot be recorded."""
    if drafter is None or not may_be_recorded(drafter):
        return []
    return [DraftBucket(step, width) for step in steps for width in draft_widths(step.queries, drafter.max_width)]


class NotRecordable(RuntimeError):
    """A drafter does what no recording can hold, although it says that it may be recorded."""


class DraftGraphs:
    """The registry. All graphs leave their drafts in one tensor: use, or copy, them before the next replay."""

    def __init__(self, drafter: DeviceDrafter, steps: StepGraphs, capture: Capture) -> None:
        """``steps``: captured already, with the same ``capture``."""
        self._drafter = drafter
        self._steps = steps
        self._capture: Capture | None = capture
        todo = draft_buckets(drafter, steps.buckets)
        self._todo = sorted(todo, key=lambda found: (-found.tokens, -found.step.tokens, -found.width, found))
        self._graphs: dict[DraftBucket, Replay] = {}
        self._by_step: dict[Bucket, list[DraftBucket]] = {}
        """Narrowest first."""
        most = max((found.step.rows * found.width for found in todo), default=0)
        self._drafts = torch.zeros(most, dtype=torch.int64, device=steps.tables.device)
        self._block_tables: dict[int, Tensor] = {}
        self._places: list[RecordedPlaces] = []
        """Kept for the graphs, which read their memory."""

    @property
    def buckets(self) -> tuple[DraftBucket, ...]:
        """Captured, in order."""
        return tuple(sorted(self._graphs))

    def capture(self, on_progress: Callable[[float, str], None] = lambda fraction, what: None) -> None:
        """Capture every graph. Once. Raises :class:`NotRecordable`."""
        capture, self._capture = self._capture, None
        assert capture is not None, "graphs are captured once, before the engine is ready"
        for done, found in enumerate(self._todo):
            on_progress(done / len(self._todo), f"{found.step.rows} x {found.step.queries}, {found.width} drafts")
            self._graphs[found] = self._record(found, capture)
        for found in self.buckets:
            self._by_step.setdefault(found.step, []).append(found)

    def find(self, step: Bucket, rows: Sequence[StepRow]) -> DraftBucket | None:
        """The graph that follows a step of these rows: the narrowest that drafts all that is wanted, if any."""
        wanted = max(row.wants_drafts for row in rows)
        return next((found for found in self._by_step.get(step, ()) if found.width >= wanted), None)

    @torch.inference_mode()
    def replay(self, found: DraftBucket) -> Tensor:
        """Follow the step that has just been replayed. Returns the drafts, int64 ``[step.rows, width]``, on the
        device. Nothing here waits for it."""
        self._graphs[found]()
        return self._drafts_of(found)

    def _drafts_of(self, found: DraftBucket) -> Tensor:
        return self._drafts[: found.step.rows * found.width].view(found.step.rows, found.width)

    def _record(self, found: DraftBucket, capture: Capture) -> Replay:
        recorded, drafts, drafter = self._steps.recorded(found.step), self._drafts_of(found), self._drafter
        places = RecordedPlaces(self._steps.tables, recorded.batch.attention, self._steps.attention, self._lend)
        self._places.append(places)

        def follow() -> None:
            places.begin()
            drafter.extend(target_step(recorded, drafts_follow=found.width > 0))
            if found.width:
                proposed = drafter.propose(draft_rows(recorded, found.width, places))
                drafts.copy_(_checked(proposed, found)[:, : found.width])

        try:
            with torch.inference_mode():
                return capture(follow)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotRecordable(f"says recordable, but recording it failed: {error}") from error

    def _lend(self, call: int, count: int) -> Tensor:
        """Block tables for ``count`` rows and the ``call``-th call of a pass, in memory that all graphs share: the
        first to ask wants most."""
        found = self._block_tables.get(call)
        if found is None or len(found) < count:
            blocks = self._steps.tables.block_tables
            found = self._block_tables[call] = blocks.new_zeros(count, blocks.shape[1])
        return found[:count]


def target_step(recorded: Recorded, drafts_follow: bool) -> TargetStep:
    """What a recorded step leaves, as drafters are told it."""
    batch = recorded.batch
    return TargetStep(
        tokens=batch.token_ids,
        next_tokens=recorded.tokens.clamp(min=0),  # as the table has them
        positions=batch.positions,
        q_lens=batch.attention.q_lens,
        slots=batch.slots,
        taps=recorded.taps,
        place=Place(batch.positions, batch.slot_mapping, batch.attention, recorded.staged),
        drafts_follow=drafts_follow,
    )


def draft_rows(recorded: Recorded, width: int, places: RecordedPlaces) -> DraftRows:
    """The rows of a recorded step, ``width`` drafts wanted for each; all that is known of them is on the device."""
    rows, queries = recorded.bucket.rows, recorded.bucket.queries
    slots, starts, num_drafts = recorded.inputs.unbind()
    inputs, tokens = recorded.batch.token_ids.view(rows, queries), recorded.tokens.view(rows, queries)
    standing = standing_drafts(inputs, tokens, num_drafts)
    last = standing + torch.arange(0, rows * queries, queries, device=standing.device)
    return DraftRows(
        index=tuple(range(rows)),
        slots=slots,
        last=last,
        tokens=recorded.tokens[last].clamp(min=0),
        positions=starts + standing + 1,
        lengths=(),
        widths=(width,) * rows,
        recording=places,
    )


def _checked(proposed: DraftTokens, found: DraftBucket) -> Tensor:
    """The tokens of a proposal. Raises ``ValueError`` for one that is no recorded drafter's."""
    shape = tuple(proposed.tokens.shape)
    if proposed.probs is not None or len(shape) != 2 or shape[0] != found.step.rows or shape[1] < found.width:
        with_probs = "" if proposed.probs is None else " with probabilities"
        raise ValueError(
            f"a recorded drafter proposed tokens {list(shape)}{with_probs}: expected {found.step.rows} rows of at "
            f"least {found.width} and no probabilities"
        )
    return proposed.tokens
