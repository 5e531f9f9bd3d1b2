import pytest

from engine.contracts.request import EngineRequest, SamplingParams, TokenLogprobs
from engine.loop.commit import Committer
from engine.loop.ledger import InFlight, Ledger
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status
from engine.step.plan import RowResult, StepPlan, StepResult

from .test_pool import pool


class Bench:
    """A committer with what it works on, and one running request."""

    def __init__(self, **sampling):
        self.ledger, self.queues, self.published, self.now = Ledger(), Queues(8), [], 5.0
        self.pool = pool(self.ledger)
        self.committer = Committer(self.queues, self.pool, self.published.append, lambda: self.now)
        params = SamplingParams(**{"max_tokens": 8, **sampling})
        request = EngineRequest("r", tuple(range(10)), params)
        stops = frozenset(params.stop_token_ids)
        self.sequence = s = Sequence(request, 1, 0, stops, 10 + params.max_tokens, 1.0, list(request.prompt))
        self.queues.add(s)
        assert self.pool.admit(s) and self.pool.grow(s, 20)
        self.queues.start(s)
        s.admission()
        self.plan_id = 0

    def step(self, num_tokens, drafts, result, epoch=None):
        row = self.sequence.schedule(self.plan_id, num_tokens, drafts, 0)
        plan = StepPlan(self.plan_id, (), (row,))
        self.plan_id += 1
        owners = ((self.sequence, self.sequence.epoch if epoch is None else epoch),)
        step = InFlight(plan, owners, lambda: None, 0.0, 0.0, 0, True, (drafts,))
        self.ledger.launched(step)
        drafted = self.committer.commit(step, StepResult(plan.plan_id, (result,), device_ms=2.0, draft_ms=1.0))
        self.ledger.retire()
        return drafted


def test_new_tokens_are_published_and_their_blocks_committed():
    bench = Bench()
    bench.step(10, 0, RowResult((50,)))
    (out,) = bench.published
    assert (out.tokens, out.finish_reason, out.at_s) == ((50,), None, 5.0)
    assert bench.sequence.lease.num_committed == 10


@pytest.mark.parametrize("at, expected", [(0, (3,)), (2, (1, 2, 3)), (3, (1, 2, 9, 3))])
def test_a_stop_token_ends_the_output_before_anything_after_it_counts(at, expected):
    bench = Bench(stop_token_ids=(3,))
    bench.step(10, 0, RowResult((50,)))
    tokens = (*expected[:-1], 3, *(7,) * (3 - at))
    bench.step(1, 3, RowResult(tokens, 3))
    out = bench.published[-1]
    assert (out.tokens, out.finish_reason, out.stop_token) == (expected, "stop", 3)
    assert bench.sequence.status is Status.FINISHED and bench.pool.allocator.usage()[0].leased == 0


def test_the_limit_of_tokens_cuts_accepted_drafts():
    bench = Bench(max_tokens=3)
    bench.step(10, 0, RowResult((50,)))
    bench.step(1, 3, RowResult((1, 2, 3, 4), 3))
    assert (bench.published[-1].tokens, bench.published[-1].finish_reason) == ((1, 2), "length")
    assert bench.published[-1].timings.accepted_tokens == 3


def test_without_tokens_wanted_the_prompt_is_computed_and_nothing_else_published():
    bench = Bench(max_tokens=0)
    bench.step(4, 0, RowResult())
    assert bench.published == []
    bench.step(6, 0, RowResult((50,)))
    assert (bench.published[-1].tokens, bench.published[-1].finish_reason) == ((), "length")


def test_results_planned_before_a_preemption_are_dropped():
    bench = Bench()
    bench.step(10, 0, RowResult((50,)), epoch=-1)
    assert bench.published == [] and len(bench.sequence.tokens) == 10


def test_a_row_that_failed_ends_its_request_alone():
    bench = Bench()
    bench.step(10, 0, RowResult(error="not finite"))
    assert (bench.published[-1].finish_reason, bench.published[-1].error) == ("error", "not finite")


def test_prompt_logprobs_of_all_chunks_come_with_the_first_token():
    entries = [TokenLogprobs(i, -0.5) for i in range(1, 10)]
    bench = Bench(prompt_logprobs=0)
    bench.step(4, 0, RowResult(prompt_logprobs=tuple(entries[:4])))
    bench.step(6, 0, RowResult((50,), prompt_logprobs=tuple(entries[4:])))
    assert bench.published[-1].prompt_logprobs == (None, *entries)


def test_what_became_of_drafts_is_counted_for_rows_that_decode():
    bench = Bench()
    assert bench.step(10, 0, RowResult((50,))).asked == []
    drafted = bench.step(1, 3, RowResult((1, 2), 1))
    assert (drafted.asked, drafted.tried, drafted.accepted_at) == ([(3, 1)], [1, 1], [1])
    assert (bench.sequence.num_drafted, bench.sequence.num_accepted) == (3, 1)
    assert (bench.sequence.num_decode_steps, bench.sequence.num_draft_chains) == (1, 1)
    assert bench.sequence.draft_ms == 1.0
