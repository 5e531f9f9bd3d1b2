"""Captured steps: which shapes, in which order, for which rows; and they compute what is computed uncaptured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.contracts.ops import CountExperts
from engine.contracts.request import SamplingParams, TokenLogprobs
from engine.kernels.context import StepContext
from engine.kernels.torch.experts import lower_count_experts
from engine.kernels.transfer import Arriving, download, refill
from engine.step import graphs, running
from engine.step.graphs import Bucket, StepGraphs, prompt_buckets, query_buckets, row_buckets
from engine.step.plan import StepPlan, StepRow
from engine.step.runner import ModelRunner
from engine.testing.no_sync import NoSync

from .frozen import RunAgain
from .toy import BLOCK, BROKEN, MAX_DRAFTS, VOCAB, blocks_of, decode, make_capture, make_runner, prompt_plan, run

GREEDY = SamplingParams(temperature=0.0)


def graphs_of(runner: ModelRunner) -> StepGraphs:
    assert runner.graphs is not None
    return runner.graphs


# Shapes -------------------------------------------------------------------------------------------------------------


def test_buckets_grow_with_the_batch_and_always_hold_the_largest() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(6) == (1, 2, 4, 6)
    assert row_buckets(32) == (1, 2, 4, 8, 16, 24, 32)
    for most in range(1, 200):
        sizes = row_buckets(most)
        assert sizes[-1] == most
        assert all(big <= max(2 * small, small + 16) for small, big in pairwise(sizes))
    assert query_buckets(0) == (1,)
    assert query_buckets(4) == (1, 2, 4, 5)


def test_a_batch_takes_the_smallest_graph_that_holds_it() -> None:
    find = graphs_of(make_runner(*(Bucket(rows, queries) for rows in (1, 2, 4) for queries in (1, 4)))).find
    assert find([decode(0, 3)]) == Bucket(1, 1)
    assert find([decode(0, 3), decode(1, 3), decode(2, 3)]) == Bucket(4, 1)
    assert find([StepRow(0, 3, 1, num_drafts=2), decode(1, 3)]) == Bucket(2, 4), "drafts on the device or not"
    assert find([decode(i, 3) for i in range(5)]) is None
    assert find([decode(0, 3, (1, 2, 3, 4))]) is None
    assert find([StepRow(0, 0, 5)]) is None, "a prompt is not a decode step"
    assert find([StepRow(0, 0, 1, samples=False)]) is None
    assert find([]) is None


def test_a_short_prompt_takes_the_smallest_graph_that_holds_it() -> None:
    small, large = Bucket(1, 4, prompt=True), Bucket(1, 8, prompt=True)
    runner = make_runner(Bucket(4, 8), small, large)
    find = graphs_of(runner).find
    tokens = (1, 2, 3)
    runner.tables.apply(prompt_plan({0: tokens, 1: tokens}, {1: SamplingParams(prompt_logprobs=0)}))
    assert [find([StepRow(0, 5, count)]) for count in (2, 4, 5, 8, 9)] == [small, small, large, large, None]
    assert find([decode(0, 3)]) == find([decode(0, 3, (1, 2))]) == Bucket(4, 8)
    assert find([StepRow(0, 0, 3, samples=False)]) is None, "a part of a prompt"
    assert find([StepRow(0, 0, 3, num_drafts=1)]) is None
    assert find([StepRow(0, 0, 3), decode(1, 3)]) is None
    assert find([StepRow(0, 0, 3), StepRow(1, 0, 3)]) is None
    assert find([StepRow(1, 0, 3)]) is None, "logits of all its tokens are wanted"
    longest = runner.tables.tokens.shape[1]
    assert find([StepRow(0, longest - 5, 3)]) == small and find([StepRow(0, longest - 4, 3)]) is None, "padding, too"


def test_prompts_are_worth_a_graph_while_the_host_takes_longer_to_launch_a_layer() -> None:
    """Layers of 61, 218 and 870 million weights: models of 1, 8 and 70 billion. Up to 64 tokens in any case."""

    def longest(weights: float, capability: tuple[int, int] | None, most: int = 2048) -> int:
        found = prompt_buckets(lambda tokens: 2.0 * weights * tokens, most, capability)
        assert [bucket.queries for bucket in found] == [1 << i for i in range(4, 4 + len(found))]
        return max((bucket.queries for bucket in found), default=0)

    assert [longest(weights, (9, 0)) for weights in (61e6, 218e6, 870e6)] == [512, 256, 64]
    assert [longest(weights, (8, 0)) for weights in (61e6, 218e6, 870e6)] == [256, 128, 64]
    assert [longest(61e6, capability) for capability in ((8, 9), (12, 0), None)] == [64, 64, 64]
    assert [longest(61e6, (9, 0), most) for most in (511, 100, 15)] == [256, 64, 0]


def test_the_largest_is_captured_first_and_nothing_once_ready() -> None:
    order: list[str] = []
    runner, capture = make_runner(), RunAgain()
    buckets = [Bucket(1, 1), Bucket(4, 4), Bucket(2, 1), Bucket(4, 1)]
    steps = StepGraphs(runner.model, runner.kv, runner.tables, (), buckets, capture)
    steps.capture(lambda fraction, what: order.append(what))
    assert order == ["4 x 4", "4 x 1", "2 x 1", "1 x 1"]
    assert steps.buckets == (Bucket(1, 1), Bucket(2, 1), Bucket(4, 1), Bucket(4, 4))
    with pytest.raises(AssertionError, match="once, before the engine is ready"):
        steps.capture()
    run(runner, prompt_plan({0: (1, 2, 3), 1: (4, 5, 6)}, {1: SamplingParams()}))
    for row_id in (0, 1):
        steps.replay(Bucket(1, 1), [decode(row_id, 3)])
    assert (capture.captured, capture.replayed) == (16, 3), "sampling and logprobs are graphs of their own"


# What a replay computes ---------------------------------------------------------------------------------------------


def test_experts_of_padding_tokens_are_not_counted() -> None:
    """Each token goes to the experts of its position and of the next one."""
    runner, counts = make_runner(), torch.zeros(8, dtype=torch.int64)
    op, weights = CountExperts(0, 8, runner.tables.nobody), SimpleNamespace(expert_counts=lambda op: counts)
    count = lower_count_experts(None, op, None, weights).call  # type: ignore[arg-type]
    (layer,), (kept,) = runner.model.layers, runner.model.layers[0].steps

    def counted(context: StepContext, residual: Tensor) -> Tensor:
        count(context, torch.stack((context.positions, context.positions + 1), dim=1) % 8)
        made: Tensor = kept.call(context, residual)
        return made

    model = replace(runner.model, layers=(replace(layer, steps=(replace(kept, call=counted),)),))
    buckets = Bucket(4, 1), Bucket(2, 3), Bucket(1, 5, prompt=True)
    runner.graphs = StepGraphs(model, runner.kv, runner.tables, (0,), buckets, make_capture())
    runner.graphs.capture()
    counts.zero_()
    run(runner, prompt_plan({1: (1, 2, 3)}))
    assert counts.tolist() == [1, 2, 2, 1, 0, 0, 0, 0], "a prompt of three in a graph of five"
    counts.zero_()
    for start in (3, 4):
        runner.graphs.replay(Bucket(4, 1), [decode(1, start)])
    assert counts.tolist() == [0, 0, 0, 1, 2, 1, 0, 0]
    run(runner, StepPlan(1, (), (decode(1, 5, (7,)),)))
    assert counts.tolist() == [0, 0, 0, 1, 2, 2, 2, 1], "a draft where there is room for two"


def test_a_replay_computes_its_rows_and_writes_their_tokens() -> None:
    runner = make_runner(Bucket(4, 1))
    tables, cache, model = runner.tables, tensor(runner.kv), runner.model
    newest = [found[0] for found in run(runner, prompt_plan({2: (1, 2, 3), 0: (7, 8, 9, 10, 4)}))]
    cache.fill_(float("nan"))
    captured, _ = graphs_of(runner).replay(Bucket(4, 1), [decode(2, 3), decode(0, 5)])
    embedded = model.embed(torch.tensor(newest))
    want = model.head(embedded).argmax(dim=1).tolist()
    assert captured.tokens[:2].tolist() == want
    assert [int(tables.tokens[2, 4]), int(tables.tokens[0, 6])] == want
    mine = [blocks_of(2)[0] * BLOCK + 3, blocks_of(0)[1] * BLOCK + 1]
    assert set(written(cache)) == {0, *mine}, "offset 0 of block 0 is the padding's"
    assert torch.equal(cache[mine], embedded[:, 0]) and torch.equal(captured.aux_hidden_states[0][:2], embedded)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_a_replayed_prompt_leaves_what_an_uncaptured_one_does(count: int) -> None:
    """After a cached prefix of three tokens; its padding writes beyond its last token, into its own blocks."""
    prefix, prompt = (1, 2, 3), tuple(range(10, 10 + count))
    row = StepRow(1, 3, count)
    made = []
    for buckets in ((), (Bucket(1, 8, prompt=True), Bucket(2, 1))):
        runner = make_runner(*buckets)
        first = prompt_plan({1: prefix + prompt})
        rows = (msgspec.structs.replace(first.rows[0], num_tokens=3, samples=False),)
        run(runner, StepPlan(0, first.admits, rows))
        cache = tensor(runner.kv)
        cache.fill_(float("nan"))
        result = runner.launch(StepPlan(1, (), (row,))).result()
        assert result.captured == bool(buckets)
        after = run(runner, StepPlan(2, (), (decode(1, 3 + count),)))
        own = {blocks_of(1)[at // BLOCK] * BLOCK + at % BLOCK for at in range(3, 3 + max(8, count + 1))}
        assert set(written(cache)) <= {0, *own}
        keys = cache[[blocks_of(1)[at // BLOCK] * BLOCK + at % BLOCK for at in range(3, 3 + count)]]
        made.append((result.rows[0].tokens, after, runner.tables.computed.tolist(), keys.tolist()))
    assert made[0] == made[1]
    assert made[0][2] == [0, 4 + count, 0, 0, 0]


def test_rows_that_are_nobodys_touch_nothing_of_anybodys() -> None:
    runner = make_runner(Bucket(4, 4))
    tables, cache = runner.tables, tensor(runner.kv)
    run(runner, prompt_plan({row_id: (1 + row_id, 2, 3) for row_id in range(3)}))
    tokens, computed = tables.tokens.clone(), tables.computed.clone()
    cache.fill_(float("nan"))
    run(runner, StepPlan(1, (), (decode(1, 3, (5,)),)))
    assert torch.equal(tables.tokens[[0, 2, 3]], tokens[[0, 2, 3]]) and torch.equal(tables.tokens[1, :4], tokens[1, :4])
    assert int(tables.tokens[tables.nobody].min()) >= 0, "the next padding must be able to embed what it finds"
    others = [0, 2, 3, tables.nobody]
    assert torch.equal(tables.computed[others], computed[others]) and int(tables.computed[tables.nobody]) == 0
    blocks = {at // BLOCK for at in written(cache)}
    assert 0 in blocks and blocks <= {0, *blocks_of(1)}


@pytest.mark.parametrize("buckets", [(), (Bucket(8, MAX_DRAFTS + 1),)], ids=["uncaptured", "captured"])
def test_rows_move_on_by_their_accepted_drafts(buckets: tuple[Bucket, ...]) -> None:
    """0 to all of them in one batch, each followed by a wrong one where there is room."""
    runner, starts = make_runner(*buckets, num_rows=8), (3, 7, 4, 9, 5)
    texts = {row_id: tuple(range(1, 1 + start)) for row_id, start in enumerate(starts)}
    newest = run(runner, prompt_plan(texts))
    assert runner.tables.computed.tolist() == [*starts, 0, 0, 0, 0]
    chains = [greedy_chain(runner, found[0], 4) for found in newest]
    drafts = [chain[:i] + ((chain[i] + 1) % BROKEN,) * (i < 3) for i, chain in enumerate(chains[:4])] + [()]
    rows = tuple(decode(i, start, drafts[i]) for i, start in enumerate(starts))
    runner.tables.apply(StepPlan(1, (), rows))
    result = runner.launch(StepPlan(1, (), rows)).result()
    assert [row.num_accepted for row in result.rows] == [0, 1, 2, 3, 0]
    assert [row.tokens for row in result.rows] == [chains[i][: n + 1] for i, n in enumerate((0, 1, 2, 3, 0))]
    assert runner.tables.computed.tolist() == [4, 9, 7, 13, 6, 0, 0, 0, 0]
    again = run(runner, StepPlan(2, (), tuple(decode(i, int(runner.tables.computed[i])) for i in range(5))))
    assert again == [greedy_chain(runner, row.tokens[-1], 1) for row in result.rows]


def test_a_step_copies_one_tensor_back_and_says_its_rows_only_where_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two rows with room for a draft each: without any, again, with one, and the other row."""
    runner, sent, fetched = make_runner(Bucket(2, 2)), list[list[int]](), list[int]()
    nobody = runner.tables.nobody
    run(runner, prompt_plan({0: (1, 2, 3), 1: (4, 5, 6)}))

    def refilled(target: Tensor, values: list[int]) -> None:
        sent.append(values)
        refill(target, values)

    def downloaded(tensors: Sequence[Tensor]) -> Arriving:
        fetched.append(len(tensors))
        return download(tensors)

    monkeypatch.setattr(graphs, "refill", refilled)
    monkeypatch.setattr(running, "download", downloaded)
    for row in (decode(0, 3), decode(0, 4), decode(0, 5, (7,)), decode(1, 3)):
        run(runner, StepPlan(1, (), (row,)))
    assert sent == [[0, nobody, 0, 0], [0, nobody, 1, 0], [1, nobody, 0, 0]]
    assert fetched == [1, 1, 1, 1]


MIX = (
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8, logprobs=0),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, frequency_penalty=1.0),
    SamplingParams(temperature=0.0, logit_bias={3: 4.0, 7: -5.0}),
    SamplingParams(temperature=0.7, min_tokens=6),
    SamplingParams(temperature=0.0, logprobs=0),
)
"""What rows may ask of sampling, seeds apart."""
NOT_ADJUSTED = tuple(params for i, params in enumerate(MIX) if i not in (5, 6, 7, 8))
STOP_IDS = (2, 11, 20)
LENGTH = 13

Served = dict[int, list[tuple[int, TokenLogprobs | None]]]
"""Tokens and logprobs by row."""


@pytest.mark.parametrize("num_drafts", [0, MAX_DRAFTS])
@pytest.mark.parametrize("mix", [MIX, NOT_ADJUSTED], ids=["mix", "not adjusted"])
def test_a_captured_mix_gives_the_uncaptured_tokens_and_takes_two_integers_per_row(
    mix: Sequence[SamplingParams], num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are right up to some position, which differs from row to row and from step to step."""
    bucket, copied = Bucket(len(mix) + 2, num_drafts + 1), list[int]()
    want = serve(make_runner(num_rows=len(bucket_rows(mix))), mix)

    def counted(target: Tensor, values: Sequence[int]) -> None:
        copied.append(len(values))
        with _disable_current_modes():
            refill(target, values)

    monkeypatch.setattr(graphs, "refill", counted)
    runner = make_runner(bucket, num_rows=len(bucket_rows(mix)))
    found = serve(runner, mix, num_drafts, want, NoSync)  # which refuses every other number of the host
    assert_same(found, want)
    assert set(copied) == {2 * bucket.rows} and (num_drafts == 0 or len(copied) > 2)


@pytest.mark.parametrize("params", MIX, ids=range(len(MIX)))
def test_the_first_token_of_a_captured_prompt_is_sampled_like_that_of_an_uncaptured_one(params: SamplingParams) -> None:
    plan, made = prompt_plan({2: (1, 5, 9, 1, 5)}, {2: params}, STOP_IDS), []
    for runner in (make_runner(), make_runner(Bucket(1, 8, prompt=True))):
        runner.apply(plan)
        result = runner.launch(plan).result()
        assert result.captured == (runner.graphs is not None)
        made.append({2: list(zip(result.rows[0].tokens, result.rows[0].logprobs or (None,), strict=True))})
    assert_same(*made)


@pytest.mark.parametrize("num_drafts", [0, MAX_DRAFTS])
def test_logprobs_of_other_tokens_are_the_uncaptured_ones(num_drafts: int) -> None:
    mix = (*MIX, SamplingParams(temperature=0.0, logprobs=3, presence_penalty=1.0), SamplingParams(logprobs=2))
    want = serve(make_runner(num_rows=len(bucket_rows(mix))), mix)
    runner = make_runner(Bucket(len(mix), num_drafts + 1), num_rows=len(bucket_rows(mix)))
    assert_same(serve(runner, mix, num_drafts, want), want)


def bucket_rows(mix: Sequence[SamplingParams]) -> range:
    return range(len(mix) + 3)


def serve(
    runner: ModelRunner,
    mix: Sequence[SamplingParams],
    num_drafts: int = 0,
    known: Served | None = None,
    watch: Callable[[], object] = nullcontext,
) -> Served:
    """``LENGTH`` tokens or more for each request, in rows of the table in another order; drafts from what is
    ``known``. Steps that are captured are launched in ``watch()``."""
    row_ids = [(3 * i + 2) % len(bucket_rows(mix)) for i in range(len(mix))]
    if len(set(row_ids)) < len(mix):
        row_ids = [len(mix) + 2 - i for i in range(len(mix))]
    prompts = {row_id: (1 + i, 5, 9, 1 + i, 5) for i, row_id in enumerate(row_ids)}
    plan = prompt_plan(prompts, dict(zip(row_ids, mix, strict=True)), STOP_IDS)
    found: Served = defaultdict(list)
    while True:
        runner.tables.apply(plan)
        inside = watch() if runner.graphs is not None and plan.plan_id else nullcontext()
        with inside:  # type: ignore[attr-defined]
            step = runner.launch(plan)
        for row, outcome in zip(plan.rows, step.result().rows, strict=True):
            assert not outcome.error
            logprobs = outcome.logprobs or (None,) * len(outcome.tokens)
            found[row.row_id] += zip(outcome.tokens, logprobs, strict=True)
        step_id = plan.plan_id + 1
        rows = [
            decode(row_id, 4 + len(done), guess(done, known, row_id, (step_id + row_id) % (num_drafts + 1), num_drafts))
            for row_id, done in found.items()
            if len(done) < LENGTH
        ]
        if not rows:
            return found
        plan = StepPlan(step_id, (), tuple(rows))


def guess(
    done: list[tuple[int, TokenLogprobs | None]], known: Served | None, row_id: int, right: int, count: int
) -> tuple[int, ...]:
    """``count`` drafts or fewer, the first ``right`` of them what will come."""
    if known is None or not count:
        return ()
    coming = [token for token, _ in known[row_id][len(done) :]]
    drafts = [token if i < right else (token + 1) % BROKEN for i, token in enumerate(coming[:count])]
    return tuple(drafts[: count - row_id % 2])


def assert_same(found: Served, want: Served) -> None:
    for row_id, expected in want.items():
        tokens = [token for token, _ in found[row_id][:LENGTH]]
        assert tokens == [token for token, _ in expected[:LENGTH]]
        for (_, one), (_, other) in zip(found[row_id], expected, strict=False):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-5)


def test_penalties_count_the_drafts_that_the_graph_wrote_over() -> None:
    """Its own tokens go where the drafts were; what is chosen anew must still see the drafts."""

    def chosen(*buckets: Bucket) -> list[list[int]]:
        runner = make_runner(*buckets)
        params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
        run(runner, prompt_plan({0: (1, 2, 3)}, {0: params}))
        found = []
        for drafts in ((5, 6, 7), (4, 4, 4), (0, 8, 9), (10, 10, 1)):
            plan = StepPlan(1, (), (decode(0, 3, drafts),))
            runner.tables.computed[0] = 3
            runner.tables.apply(plan)
            sampled = runner.launch(plan)._sampled
            assert sampled is not None
            found.append(sampled.choice.tokens.tolist())
        return found

    assert chosen(Bucket(1, 4)) == chosen()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_a_row_of_broken_logits_fails_alone_and_leaves_a_token_to_embed(params: SamplingParams) -> None:
    runner = make_runner(Bucket(2, 2))
    run(runner, prompt_plan({0: (1, 2, 3), 1: (4, 5, 6)}, {0: params, 1: params}))
    runner.tables.tokens[1, 3] = BROKEN
    plan = StepPlan(1, (), (decode(0, 3), decode(1, 3, (1,))))
    runner.tables.apply(plan)
    good, bad = runner.launch(plan).result().rows
    assert len(good.tokens) == 1 and not good.error
    assert bad.tokens == () and "not finite" in bad.error
    assert runner.tables.computed[1] == 4 and 0 <= int(runner.tables.tokens[1, 4]) < VOCAB


def tensor(cache: object) -> Tensor:
    assert isinstance(cache, Tensor)
    return cache


def written(cache: Tensor) -> list[int]:
    found: list[int] = torch.nonzero(~cache.isnan()).squeeze(1).tolist()
    return found


def greedy_chain(runner: ModelRunner, token: int, count: int) -> tuple[int, ...]:
    found = []
    for _ in range(count):
        token = int(runner.model.head(runner.model.embed(torch.tensor([token]))).argmax())
        found.append(token)
    return tuple(found)
