"""Requests through one or several simulated engines."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine_lab.shared.simulation.engine import Progress, SimulatedEngine
from engine_lab.shared.simulation.outcome import Outcome, SimulatedRequest
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.shared.simulation.texts import Texts
from engine_lab.shared.simulation.trace import TraceRequest

Route = Callable[[TraceRequest, Sequence[int]], int]
"""Chooses the engine of a request, by index; it is given how many requests each engine has at the moment."""

ENDS, ARRIVES, POSTED, WAKES = range(4)
"""Kinds of events, in the order in which those of one moment happen."""


def simulate(
    requests: Iterable[TraceRequest],
    engines: Sequence[EngineSpec],
    *,
    route: Route | None = None,
    seed: int = 0,
    leap: bool = True,
) -> Outcome:
    """Serve ``requests`` and return what became of each.

    ``route``: round robin by default. ``leap``: compute runs of equal decode steps at once; what comes out is the same.
    ``seed``: of accepted drafts. Raises ``ValueError`` if a request waits for one that is not in the trace, or for
    itself.
    """
    return Simulation(requests, engines, route or round_robin(), seed, leap).run()


def round_robin() -> Route:
    """The engines in turn."""
    turns = count()
    return lambda request, loads: next(turns) % len(loads)


class Simulation:
    """The events of all engines and their clients, in order of time."""

    def __init__(
        self, requests: Iterable[TraceRequest], specs: Sequence[EngineSpec], route: Route, seed: int, leap: bool
    ) -> None:
        self._trace = tuple(requests)
        self._specs = specs
        self._engines = [SimulatedEngine(spec, seed, leap) for spec in specs]
        self._route = route
        self._texts = Texts()
        self._loads = [0] * len(specs)
        self._events: list[tuple[float, int, int, int]] = []
        """When, what kind, a number that keeps equal ones in order, and of which request or engine."""
        self._order = count()
        self._followers = _followers(self._trace)
        self._missing = [len(set(request.after)) for request in self._trace]
        """By request: how many of those that it waits for have not ended."""
        self._open: dict[int, _Open] = {}
        self._done: dict[int, SimulatedRequest] = {}

    def run(self) -> Outcome:
        handlers = {ENDS: self._end, ARRIVES: self._receive, POSTED: self._post, WAKES: self._wake}
        sent = [which for which, request in enumerate(self._trace) if not request.after]
        independent = iter(sorted(sent, key=lambda which: self._trace[which].arrival_s))
        self._next_arrival(independent)
        while self._events:
            now, kind, _, which = heapq.heappop(self._events)
            handlers[kind](now, which)
            if kind == ARRIVES and not self._trace[which].after:
                self._next_arrival(independent)
        if len(self._done) < len(self._trace):
            left = [request.request_id for which, request in enumerate(self._trace) if which not in self._done]
            raise ValueError(f"{len(left)} requests of the trace wait for each other, {left[0]!r} is one of them")
        itl: Counter[int] = sum((engine.itl_us for engine in self._engines), Counter())
        done = tuple(self._done[which] for which in range(len(self._trace)))
        ended_s = max((request.arrival_s + request.e2e_ms / 1e3 for request in done), default=0.0)
        return Outcome(done, tuple(engine.steps for engine in self._engines), ended_s, tuple(sorted(itl.items())))

    def _next_arrival(self, independent: Iterator[int]) -> None:
        which = next(independent, None)
        if which is not None:
            self._at(self._trace[which].arrival_s, ARRIVES, which)

    def _at(self, when_s: float, kind: int, which: int) -> None:
        heapq.heappush(self._events, (when_s, kind, next(self._order), which))

    def _receive(self, now: float, which: int) -> None:
        request = self._trace[which]
        engine = self._route(request, self._loads)
        self._loads[engine] += 1
        overheads = self._specs[engine].overheads
        posted_s = now + overheads.receive_ms / 1e3 + overheads.tokenize_us * request.prompt_tokens / 1e6
        self._open[which] = _Open(now, posted_s, engine)
        self._at(posted_s, POSTED, which)

    def _post(self, now: float, which: int) -> None:
        request, index = self._trace[which], self._open[which].engine
        prompt, output = self._texts.of(request)
        sampling = SamplingParams(max_tokens=request.output_tokens, seed=which, ignore_eos=True)
        engine = self._engines[index]
        before = engine.next_s
        engine.post(now, EngineRequest(str(which), prompt, sampling), output)
        if engine.next_s is not None and engine.next_s != before:
            self._at(engine.next_s, WAKES, index)

    def _wake(self, now: float, which: int) -> None:
        engine = self._engines[which]
        if engine.next_s != now:
            return  # a message has come meanwhile
        for output in engine.run():
            if output.finish_reason is not None:
                self._finish(which, int(output.request_id), output)
        if engine.next_s is not None:
            self._at(engine.next_s, WAKES, which)

    def _finish(self, engine: int, which: int, output: TokensOut) -> None:
        opened, request = self._open.pop(which), self._trace[which]
        progress = self._engines[engine].forget(output.request_id)
        deliver_s = self._specs[engine].overheads.deliver_ms / 1e3
        done = self._done[which] = _summary(request, opened, progress, output, deliver_s)
        self._at(done.arrival_s + done.e2e_ms / 1e3 if not done.error else self._engines[engine].clock.now, ENDS, which)

    def _end(self, now: float, which: int) -> None:
        self._loads[self._done[which].engine] -= 1
        for follower in self._followers.pop(self._trace[which].request_id, ()):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._at(now + self._trace[follower].arrival_s, ARRIVES, follower)


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that has not ended."""

    arrival_s: float
    posted_s: float
    engine: int


def _summary(
    request: TraceRequest, opened: _Open, progress: Progress, output: TokensOut, deliver_s: float
) -> SimulatedRequest:
    timings = output.timings
    if output.finish_reason == "error" or timings is None:
        return SimulatedRequest(
            opened.arrival_s,
            opened.engine,
            request.prompt_tokens,
            0,
            error=output.error,
            service_class=request.service_class,
        )
    first_s, last_s, tokens = progress.first_s + deliver_s, progress.last_s + deliver_s, progress.num_tokens
    return SimulatedRequest(
        arrival_s=opened.arrival_s,
        engine=opened.engine,
        prompt_tokens=request.prompt_tokens,
        output_tokens=tokens,
        cached_tokens=timings.cached_tokens,
        ttft_ms=(first_s - opened.arrival_s) * 1e3,
        e2e_ms=(last_s - opened.arrival_s) * 1e3,
        itl_ms=(last_s - first_s) / (tokens - 1) * 1e3 if tokens > 1 else 0.0,
        api_ms=(opened.posted_s - opened.arrival_s) * 1e3,
        dispatch_ms=(timings.submitted_s - opened.posted_s) * 1e3,
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        decode_ms=timings.decode_ms,
        deliver_ms=deliver_s * 1e3,
        preemptions=timings.preemptions,
        drafted=timings.drafted_tokens,
        accepted=timings.accepted_tokens,
        service_class=request.service_class,
    )


def _followers(trace: Sequence[TraceRequest]) -> dict[str, list[int]]:
    """By id: the requests that wait for it."""
    followers: dict[str, list[int]] = defaultdict(list)
    ids = {request.request_id for request in trace if request.request_id}
    for which, request in enumerate(trace):
        for name in dict.fromkeys(request.after):
            if name not in ids:
                raise ValueError(f"request {which} of the trace waits for {name!r}, which is not in it")
            followers[name].append(which)
    return followers
