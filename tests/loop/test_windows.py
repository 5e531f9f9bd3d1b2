"""Long contexts through the loop, with a virtual device: what a window holds, and that nothing is lost."""

from __future__ import annotations

import random

import pytest

from engine.contracts.events import PrefixCacheEvent, StepEvent
from engine.contracts.graph import EVERY_TOKEN, Reach
from engine.contracts.request import EngineRequest, SamplingParams
from tests.exact_model import expected_output
from tests.laws.harness import BLOCK, VOCAB
from tests.selection import few

from .simulated import Simulation, simulate

WINDOW, BUDGET, DRAFTS = 512, 64, 3
FULL, CHUNK, STATE = EVERY_TOKEN, Reach("chunked", WINDOW), Reach("state")


def window(tokens: int) -> Reach:
    return Reach("window", tokens)


def request(name: str, prompt: int, outputs: int, seed: int = 0) -> EngineRequest:
    rng = random.Random(seed)
    tokens = tuple(rng.randrange(VOCAB - 2) for _ in range(prompt))
    return EngineRequest(name, tokens, SamplingParams(max_tokens=outputs, temperature=0.0))


def serve(simulation: Simulation, *requests: EngineRequest) -> tuple[dict[str, list[int]], list[int]]:
    """Outputs, and the most blocks of each group that were leased between two steps."""
    outputs: dict[str, list[int]] = {each.request_id: [] for each in requests}
    most = [0] * len(simulation.allocator.usage())
    for each in requests:
        simulation.core.submit(each)
    while simulation.core.has_work:
        for out in simulation.core.step().outputs:
            assert out.finish_reason != "error", out.error
            outputs[out.request_id] += out.tokens
        most = [max(before, usage.leased) for before, usage in zip(most, simulation.allocator.usage(), strict=True)]
    simulation.core.check_idle()
    simulation.allocator.check()
    return outputs, most


@few(2)
@pytest.mark.parametrize("allocator", ["paged", "prefix_cache", "contiguous"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("reach", "seen"), [(window(WINDOW), WINDOW), (CHUNK, WINDOW), (STATE, BLOCK)])
def test_a_context_of_32k_tokens_holds_no_more_blocks_than_its_queries_see(
    allocator: str, in_flight: int, reach: Reach, seen: int
) -> None:
    simulation = simulate(
        f"kv_allocator={allocator}", in_flight=in_flight, max_len=32768, kv_tokens=2 * 32768, reaches=(FULL, reach)
    )
    long = request("long", 32000, 8)
    outputs, (full, held) = serve(simulation, long)
    assert len(outputs["long"]) == 8
    needed = -(-(seen + in_flight * BUDGET) // BLOCK) + 1
    print(f"{allocator}, {in_flight} in flight: {full} blocks of all tokens, {held} of {reach}")
    assert full >= 32000 // BLOCK
    assert held <= needed + 1, f"{held} blocks for {reach}, {in_flight} steps of {BUDGET}"


@few(2)
@pytest.mark.parametrize(
    "reaches",
    [(window(WINDOW),), (FULL, window(100)), (window(40), FULL, window(100)), (FULL, CHUNK), (STATE, FULL), (STATE,)],
)
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_the_smallest_pool_holds_one_request_of_the_longest_context(reaches: tuple[Reach, ...], drafts: int) -> None:
    for allocator in ("paged", "prefix_cache", "contiguous"):
        simulation = simulate(f"kv_allocator={allocator}", drafts=drafts, max_len=4096, kv_tokens=4096, reaches=reaches)
        requests = [request(f"r{seed}", 4000, 20, seed) for seed in range(2)]
        outputs, _ = serve(simulation, *requests)
        for each in requests:
            assert outputs[each.request_id] == expected_output(each.prompt, 20, VOCAB)


@few(4)
@pytest.mark.parametrize("allocator", ["paged", "prefix_cache", "contiguous"])
@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked_prefill"])
@pytest.mark.parametrize("reach", [window(24), Reach("chunked", 24), STATE])
def test_tokens_and_blocks_are_the_same_when_either_group_is_short(
    allocator: str, scheduler: str, reach: Reach
) -> None:
    """Of many short requests the pool of what forgets is short, of few long ones that of all tokens."""
    for prompt, count in ((20, 40), (300, 6)):
        simulation = simulate(
            f"kv_allocator={allocator}", f"scheduler={scheduler}", drafts=DRAFTS, max_len=400, kv_tokens=800,
            reaches=(FULL, reach),
        )  # fmt: skip
        requests = [request(f"r{seed}", prompt + seed, 30, seed) for seed in range(count)]
        outputs, _ = serve(simulation, *requests)
        for each in requests:
            assert outputs[each.request_id] == expected_output(each.prompt, 30, VOCAB)


def test_beside_a_pool_for_one_long_request_many_short_ones_run_at_once_and_are_found_again() -> None:
    """A window of 64 in a pool of as many tokens as one request may have: the pool of windows is for more than one."""
    simulation = simulate(
        "kv_allocator=prefix_cache", max_len=8192, kv_tokens=8192, reaches=(FULL, window(64)),
    )  # fmt: skip
    requests = [request(f"r{seed}", 96, 32, seed) for seed in range(16)]
    running, cached = [], []
    for again in ("", "again"):
        for each in requests:
            simulation.core.submit(EngineRequest(each.request_id + again, each.prompt, each.sampling))
        while simulation.core.has_work:
            for event in simulation.core.step().events:
                if isinstance(event, StepEvent):
                    running.append(event.running)
                if isinstance(event, PrefixCacheEvent) and again:
                    cached.append(event.hits)
    assert max(running) == 16 and cached == [95] * 16
