"""Engine cores around the exact-integer model: every plugin real, every output known beforehand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.plan import EnginePlan
from engine.contracts.drafter import aux_layers_of
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.loop.core import EngineCore
from engine.loop.forcing import MatcherOf
from engine.startup.build import make_core
from engine.step.graphs import Bucket, StepGraphs, prompt_buckets, query_buckets, row_buckets
from engine.step.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.step.tables import DeviceTables
from tests.exact_model import ExactKV, ExactModel, expected_output

VOCAB = 97
BLOCK = 8


@dataclass(slots=True)
class Exact:
    """A core and what it is made of."""

    core: EngineCore
    model: ExactModel
    kv: ExactKV
    allocator: object
    runner: ModelRunner


def exact_engine(
    *overrides: str,
    kv_tokens: int = 4096,
    max_len: int = 256,
    fail_on: int | None = None,
    graphs: bool = False,
    matcher_of: MatcherOf | None = None,
) -> Exact:
    """A core with the plugins the overrides select, on a pool of ``kv_tokens`` tokens.

    ``graphs``: decode steps and short prompts are captured ones, replayed by running the captured function again.
    """
    plan = _plan(overrides)
    plan = replace(plan, max_len=max_len, model=replace(plan.model, vocab_size=VOCAB, eos_token_ids=()))
    bound = bind(plan)
    num_blocks = kv_tokens // BLOCK + 1
    max_len = min(max_len, kv_tokens)
    groups = (KVGroup(0, (0,), "full", BLOCK, num_blocks),)
    bound.kv_allocator.start(groups)
    kv = ExactKV(num_blocks, BLOCK)
    tables = DeviceTables(bound.context.max_requests, max_len, bound.drafter.max_width, BLOCK, "cpu", VOCAB)
    model = ExactModel(VOCAB, fail_on)
    registry = None
    if graphs:
        shapes = (row_buckets(bound.context.max_requests), query_buckets(bound.drafter.max_width))
        decode = [Bucket(rows, queries) for rows, queries in itertools.product(*shapes)]
        buckets = [*decode, *prompt_buckets(lambda tokens: 0.0, max_len, (9, 0))]
        registry = StepGraphs(model, kv, tables, aux_layers_of(bound.drafter), buckets, capture=run_again)
        registry.capture()
    runner = ModelRunner(model, kv, tables)
    runner.graphs = registry
    core = make_core(plan, bound, DeviceQueue(runner, DeviceWorker(plan.overlap)), groups, max_len, matcher_of)
    return Exact(core, model, kv, bound.kv_allocator, runner)


def run_again(step: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a CUDA graph where there is none."""
    step()
    return step


@cache
def _plan(overrides: tuple[str, ...]) -> EnginePlan:
    return assemble(["model.path=bundled", "device=cpu", f"kv_allocator.block_size={BLOCK}", "exporter=[]", *overrides])


def random_requests(seed: int, count: int, longest: int = 60, shared: int = 24) -> list[EngineRequest]:
    """Prompts of 1 to ``longest`` tokens, about half of them after one of two shared beginnings."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(VOCAB - 2) for _ in range(shared)] for _ in range(2)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB - 2) for _ in range(rng.randint(1, longest))]
        if rng.random() < 0.5:
            prompt = rng.choice(beginnings) + prompt
        params = SamplingParams(max_tokens=rng.randint(1, 24), temperature=0.0)
        requests.append(EngineRequest(f"r{i}", tuple(prompt), params, priority=rng.choice((0, 0, 0, 1))))
    return requests


def expected(request: EngineRequest) -> list[int]:
    return expected_output(request.prompt, request.sampling.max_tokens, VOCAB)


def run(core: EngineCore, requests: Sequence[EngineRequest], per_step: int = 3) -> dict[str, list[int]]:
    """Submit a few requests before every step until all have ended; their outputs by id."""
    waiting = list(requests)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: dict[str, TokensOut] = {}
    steps = 0
    while len(ended) < len(requests):
        for request in waiting[:per_step]:
            core.submit(request)
        del waiting[:per_step]
        for out in core.step().outputs:
            assert out.request_id not in ended, "an output came after the end"
            outputs[out.request_id].extend(out.tokens)
            if out.finish_reason is not None:
                ended[out.request_id] = out
        steps += 1
        assert steps < 20_000, "no end in sight"
    settle(core)
    return outputs


def settle(core: EngineCore) -> None:
    """Let steps in flight retire."""
    while core.has_work:
        core.step()


def assert_nothing_held(engine: Exact) -> None:
    """Every block and row is back."""
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.rows_used, stats.blocks_leased) == (0, 0, 0, 0), stats
    assert all(blocks.free + blocks.cached == blocks.total for blocks in stats.blocks)
    engine.allocator.check()  # type: ignore[attr-defined]
