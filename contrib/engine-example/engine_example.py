"""A scheduler and a drafter: everything a plugin package needs, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.contracts.config import DrafterConfig, SchedulerConfig, at_least
from engine.contracts.drafter import Draft, DraftRow
from engine.contracts.provider import BuildContext, Provider
from engine.contracts.scheduler import RequestView, Schedule, ScheduledRow, SchedulerView, fit, minus
from engine.hookspecs import hookimpl


@hookimpl
def engine_scheduler() -> list[Provider]:
    return [Provider("shortest_first", "engine_example:ShortestFirst", doc="The prompt with the fewest tokens first.")]


@hookimpl
def engine_drafter() -> list[Provider]:
    return [
        Provider(
            "repeat_last",
            "engine_example:RepeatLast",
            config=RepeatLastConfig,
            provides=("drafts", "host_drafter"),
            doc="Drafts more of a token that repeats.",
        )
    ]


class ShortestFirst:
    """Decoding requests first, then prompts by tokens left: short ones never queue behind a long one."""

    def __init__(self, config: SchedulerConfig, context: BuildContext) -> None:
        pass

    def plan(self, view: SchedulerView) -> Schedule:
        rows: list[ScheduledRow] = []
        tokens, blocks = view.token_budget, view.free_blocks
        running = sorted(view.running, key=_tokens_left)
        for request in (*running, *sorted(view.waiting, key=_tokens_left)[: view.free_rows]):
            drafts = request.num_draft_tokens if request.remaining == 1 else 0
            num_tokens = min(request.remaining, tokens - drafts)
            # A newcomer has to find room for its whole prompt; who runs already gets it by preempting.
            needed = view.blocks_needed(request.request_id, num_tokens if request.is_running else request.remaining)
            if num_tokens <= 0 or not (request.is_running or fit(needed, blocks)):
                break
            rows.append(ScheduledRow(request.request_id, num_tokens))
            tokens, blocks = tokens - num_tokens - drafts, minus(blocks, needed)
        # The most tokens left first. The request with the fewest is never a victim, so one always gets on.
        return Schedule(tuple(rows), tuple(victim.request_id for victim in reversed(running[1:])))


def _tokens_left(request: RequestView) -> tuple[int, int]:
    return request.remaining, request.arrival


@dataclass(frozen=True)
class RepeatLastConfig(DrafterConfig):
    min_run: int = 2
    """Draft only after this many equal tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("drafter.min_run", self.min_run, 1)


class RepeatLast:
    """Drafts the last token again and again, once it has repeated ``min_run`` times."""

    placement: Literal["host", "device"] = "host"

    def __init__(self, config: RepeatLastConfig, context: BuildContext) -> None:
        self.max_width = config.max_width
        self._min_run = config.min_run

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tuple(self._continue(row) for row in rows))

    def _continue(self, row: DraftRow) -> tuple[int, ...]:
        tail = tuple(row.tokens[-self._min_run :])
        if len(tail) < self._min_run or len(set(tail)) > 1:
            return ()
        return (tail[-1],) * row.num_draft_tokens

    def release(self, row_id: int) -> None:
        """Nothing is kept."""
