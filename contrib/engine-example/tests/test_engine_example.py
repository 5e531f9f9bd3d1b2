from engine_example import RepeatLast, RepeatLastConfig, SchedulerConfig, ShortestFirst

from engine.contracts.drafter import DraftRow
from engine.contracts.scheduler import RequestView, SchedulerView
from engine.contracts.step_cost import StepCost
from engine.testing.context import build_context
from engine.testing.drafter import HostDrafterConformance
from engine.testing.scheduler import BLOCK, SchedulerConformance


def request(name: str, known: int, computed: int = 0, running: bool = False, arrival: int = 0) -> RequestView:
    return RequestView(name, known, computed, running, 0, arrival, known + 10, 0)


def view(running: tuple[RequestView, ...], waiting: tuple[RequestView, ...], budget: int = 100) -> SchedulerView:
    return SchedulerView(
        running,
        waiting,
        num_running=len(running),
        free_rows=4 - len(running),
        free_blocks=(100,),
        token_budget=budget,
        itl_target_ms=0.0,
        step_cost=StepCost(0, 0, 0),
        blocks_needed=lambda name, n: (0,),
        blocks_held=lambda name: (0,),
    )


def scheduler() -> ShortestFirst:
    return ShortestFirst(SchedulerConfig(), build_context())


def test_a_short_prompt_overtakes_a_long_one() -> None:
    plan = scheduler().plan(view((), (request("long", 90), request("short", 5, arrival=1))))
    assert [row.request_id for row in plan.rows] == ["short", "long"]


def test_decoding_comes_before_every_prompt_and_the_budget_is_kept() -> None:
    decoding = request("decoding", 8, 7, running=True)
    plan = scheduler().plan(view((decoding,), (request("long", 90), request("short", 5)), budget=20))
    assert [(row.request_id, row.num_tokens) for row in plan.rows] == [("decoding", 1), ("short", 5), ("long", 14)]


def test_no_more_requests_start_than_there_are_rows() -> None:
    plan = scheduler().plan(view((), tuple(request(str(n), 1 + n) for n in range(9))))
    assert len(plan.rows) == 4


def test_only_a_repeating_token_is_drafted() -> None:
    drafter = RepeatLast(RepeatLastConfig(min_run=3), build_context())
    rows = (DraftRow(0, (1, 7, 7, 7), 1, 2), DraftRow(1, (7, 7, 1), 1, 2), DraftRow(2, (7, 7), 1, 2))
    assert drafter.propose(rows).tokens == ((7, 7), (), ())


class TestShortestFirst(SchedulerConformance):
    def make(self) -> ShortestFirst:
        return ShortestFirst(SchedulerConfig(), build_context(BLOCK))


class TestRepeatLast(HostDrafterConformance):
    history = (5, 6, 7, 7, 7)

    def make(self) -> RepeatLast:
        return RepeatLast(RepeatLastConfig(), build_context())
