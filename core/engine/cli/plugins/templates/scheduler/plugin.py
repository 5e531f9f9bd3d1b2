"""Scheduler ``mine``: first come, first served; prompts run in chunks beside the requests that decode."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SchedulerConfig, at_least
from engine.contracts.provider import BuildContext, Provider
from engine.contracts.scheduler import Blocks, RequestView, Schedule, ScheduledRow, SchedulerView, fit, minus
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineSchedulerConfig(SchedulerConfig):
    """The keys ``scheduler.<field>``; those of the base are there for every scheduler."""

    max_prompts: int = 8
    """Most prompts that one step computes tokens of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("scheduler.max_prompts", self.max_prompts, 1)


@hookimpl
def engine_scheduler() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.scheduler.plugin:MineScheduler",
            config=MineSchedulerConfig,
            doc="First come, first served, with prompts in chunks.",
        )
    ]


class MineScheduler:
    """Decodes, then prompts that have started, then new ones: each in the order of the view."""

    def __init__(self, config: MineSchedulerConfig, context: BuildContext) -> None:
        self._max_prompts = config.max_prompts

    def plan(self, view: SchedulerView) -> Schedule:
        """Choose the rows of the next step from the view alone: the same view must give the same schedule."""
        decoding = [request for request in view.running if request.remaining == 1]
        started = [request for request in view.running if request.remaining > 1]
        prompts = (*started, *view.waiting[: view.free_rows])[: self._max_prompts]
        rows: list[ScheduledRow] = []
        tokens, blocks = view.token_budget, view.free_blocks
        for request in (*decoding, *prompts):
            drafts = request.num_draft_tokens if request.remaining == 1 else 0
            num_tokens = min(request.remaining, tokens - drafts)
            if num_tokens <= 0:
                break
            needed = _blocks(view, request, num_tokens)
            if not (request.is_running or fit(needed, blocks)):
                break
            rows.append(ScheduledRow(request.request_id, num_tokens))
            tokens, blocks = tokens - num_tokens - drafts, minus(blocks, needed)
        # The newest is the first victim, the oldest never is one: so one request always gets on.
        return Schedule(tuple(rows), tuple(request.request_id for request in reversed(view.running[1:])))


def _blocks(view: SchedulerView, request: RequestView, num_tokens: int) -> Blocks:
    """KV blocks to count for a row. A new request needs room for its whole prompt; one that runs may preempt others."""
    return view.blocks_needed(request.request_id, num_tokens if request.is_running else request.remaining)
