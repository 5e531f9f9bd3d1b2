"""What a step pays for its events and for waterfalls, and what keeping them takes.

    python -m tools.benchmarks.event_cost [--batch 1 8 32]

For steps of each batch size, in microseconds: making the event, sending and receiving it (what an event without these
fields takes is left out), and keeping it for waterfalls. Then the memory of what is kept after 2,000 and 20,000
requests of 50 steps each. Medians of many repetitions: nothing else is to run on this core.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import msgspec

from engine import LLM
from engine.contracts.events import Chunk, Event, RequestEvent, StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.messages import EngineStats, FromEngine, StepOutputs
from engine.loop.step_work import StepContents, contents_of
from engine.service.prefix_misses import RecentPrompts
from engine.service.waterfall import Waterfalls

REPEATS, INNER = 15, 200
STEPS_PER_REQUEST = 50


def microseconds(function: Callable[[], object]) -> float:
    """Median over repetitions of the mean time of a call."""
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(INNER):
            function()
        taken.append((time.perf_counter() - begun) / INNER * 1e6)
    return statistics.median(taken)


def decode_event(llm: LLM, batch: int) -> tuple[StepEvent, Callable[[], object]]:
    """An event of a step in which ``batch`` requests decode, and what makes its new fields."""
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        prompt = tuple((i * 7 + j) % 1000 for j in range(32))
        llm.core.submit(EngineRequest(f"event-cost-{batch}-{i}", prompt, sampling, cache_salt=str(i)))
    rows: list[Any] = []

    def watched(of_step: Iterable[Any]) -> StepContents:
        rows[:] = of_step
        return contents_of(rows)

    decoding: list[tuple[StepEvent, list[Any]]] = []
    with mock.patch("engine.loop.core.contents_of", watched):
        while llm.core.has_work:
            events = [event for event in llm.core.step().events if isinstance(event, StepEvent)]
            decoding += [(event, rows.copy()) for event in events if event.num_decode_tokens == batch]
    event, of_event = decoding[0]
    return event, lambda: contents_of(of_event)


def report(llm: LLM, batch: int) -> None:
    event, make = decode_event(llm, batch)
    chunks = tuple(Chunk(f"completion-{i:032x}-0", 64, 512) for i in range(min(batch, 4)))
    event = msgspec.structs.replace(event, chunks=chunks)
    plain = msgspec.structs.replace(event, chunks=(), decode_context=0, prefill_context=0, captured=False)
    encode, decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(FromEngine)

    def sent(one: Event) -> float:
        message = StepOutputs((), (one,), EngineStats())
        packed = encode(message)
        return microseconds(lambda: decoder.decode(encode(message))) if packed else 0.0

    kept = Waterfalls()
    parts = {
        "made": microseconds(make),
        "sent and received": sent(event) - sent(plain),
        "kept": microseconds(lambda: kept.add((event,))),
    }
    told = ", ".join(f"{name} {us:.1f}" for name, us in parts.items())
    print(f"batch {batch:3}: {told}; together {sum(parts.values()):.1f} us a step")


def memory(num_requests: int) -> float:
    """MiB that waterfalls and recent prompts hold after so many requests of 300 tokens."""
    step = StepEvent(0.0, 0, 11.0, 0.3, 10.5, 4, 64, 3, 4, 2, 0.4, chunks=(Chunk("x", 64, 0),))
    request = RequestEvent(0.0, "", "length", 300, 50, *(10.0,) * 8, 0, 0, 0, 0)
    tracemalloc.start()
    waterfalls, prompts, at_s = Waterfalls(), RecentPrompts(), 0.0
    for number in range(num_requests):
        name = f"completion-{number:032x}-0"
        prompts.add(name, array("I", range(number, number + 300)), "")
        for _ in range(STEPS_PER_REQUEST):
            at_s += 0.011
            chunk = (Chunk(name, 64, number),)
            waterfalls.add((msgspec.structs.replace(step, at_s=at_s, step=number, chunks=chunk),))
        waterfalls.add((msgspec.structs.replace(request, at_s=at_s, request_id=name),))
    held = tracemalloc.get_traced_memory()[0] / (1 << 20)
    tracemalloc.stop()
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    flags = parser.parse_args()
    llm = LLM("bundled", overrides=["scheduler.max_requests=32", "drafter=none", "overlap=false"])
    for batch in flags.batch:
        report(llm, batch)
    llm.close()
    for count in (2_000, 20_000):
        print(f"kept after {count:,} requests: {memory(count):.1f} MiB")


if __name__ == "__main__":
    main()
