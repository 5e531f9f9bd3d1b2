"""Requests through one or several simulated engines, sent where a router says."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import cast

from engine.assembly.bind import build_context, build_slots
from engine.assembly.plan import EnginePlan
from engine.contracts.config import SloClass
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.contracts.router import (
    Answer,
    ApiRequest,
    Attempts,
    EngineView,
    Reject,
    Route,
    Router,
    RouterTold,
    ToEngine,
    ToUrl,
)
from engine.service.forecast import Expected, Forecast
from engine.service.load import Load, Share
from engine.service.promises import Promise
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.engine import SimulatedEngine, TokenTimes
from engine_lab.shared.simulation.outcome import Outcome, SimulatedRequest
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.shared.simulation.texts import Texts
from engine_lab.shared.simulation.trace import TraceRequest

ENDS, DIES, ARRIVES, POSTED, LATE, WAKES = range(6)
"""Kinds of events, in the order in which those of one moment happen."""
NOWHERE = -1


def simulate(
    requests: Iterable[TraceRequest],
    engines: Sequence[EngineSpec],
    *,
    router: Router | None = None,
    deaths: Mapping[int, float] | None = None,
    max_queue: int | None = None,
    seed: int = 0,
    leap: bool = True,
) -> Outcome:
    """Serve ``requests`` and return what became of each.

    ``router``: of the first engine's plan by default. ``deaths``: engines that die, by index, and when (s); they are
    not started again. ``max_queue``: requests of a class beyond so many are refused; ``None``: none is. ``leap``:
    compute runs of equal decode steps at once; what comes out is the same. ``seed``: of accepted drafts. Raises
    ``ValueError`` if a request waits for one that is not in the trace, or for itself, and if the router sends a request
    to another server, or answers it.
    """
    router = router or router_of(engines[0].plan)
    return Simulation(requests, engines, router, deaths or {}, seed, leap, max_queue).run()


def router_of(plan: EnginePlan) -> Router:
    """The plan's router, built. Raises :class:`~engine.assembly.errors.AssemblyError`."""
    return cast(Router, build_slots(plan, ("router",), build_context(plan))["router"][0])


class Simulation:
    """The events of all engines and their clients, in order of time."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        specs: Sequence[EngineSpec],
        router: Router,
        deaths: Mapping[int, float],
        seed: int,
        leap: bool,
        max_queue: int | None = None,
    ) -> None:
        self._trace = tuple(requests)
        self._specs = specs
        self._engines = [SimulatedEngine(spec, seed, leap) for spec in specs]
        self._router = router
        self._texts = Texts()
        self._loads = [Load() for _ in specs]
        self._clock, self._slo = VirtualClock(), specs[0].plan.settings.slo
        self._forecasts = [Forecast(self._slo.late_s, self._clock) for _ in specs]
        self._alive = [True] * len(specs)
        self._events: list[tuple[float, int, int, int]] = []
        """When, what kind, a number that keeps equal ones in order, and of which request or engine."""
        self._order = count()
        self._followers = _followers(self._trace)
        self._missing = [len(set(request.after)) for request in self._trace]
        """By request: how many of those that it waits for have not ended."""
        self._max_queue, self._queued = max_queue, Counter[str]()
        self._open: dict[int, _Open] = {}
        self._done: dict[int, SimulatedRequest] = {}
        for index, at_s in deaths.items():
            self._at(at_s, DIES, index)

    def run(self) -> Outcome:
        handlers = {
            ENDS: self._end, DIES: self._die, ARRIVES: self._receive, POSTED: self._post,
            LATE: self._cancel, WAKES: self._wake,
        }  # fmt: skip
        sent = [which for which, request in enumerate(self._trace) if not request.after]
        independent = iter(sorted(sent, key=lambda which: self._trace[which].arrival_s))
        self._next_arrival(independent)
        while self._events:
            now, kind, _, which = heapq.heappop(self._events)
            self._clock.now = now
            handlers[kind](now, which)
            if kind == ARRIVES and not self._trace[which].after:
                self._next_arrival(independent)
        if len(self._done) < len(self._trace):
            left = [request.request_id for which, request in enumerate(self._trace) if which not in self._done]
            raise ValueError(f"{len(left)} requests of the trace wait for each other, {left[0]!r} is one of them")
        itl: Counter[int] = sum((engine.itl_us for engine in self._engines), Counter())
        done = tuple(self._done[which] for which in range(len(self._trace)))
        ended_s = max((request.arrival_s + request.e2e_ms / 1e3 for request in done), default=0.0)
        steps = tuple(engine.steps for engine in self._engines)
        stores = tuple(engine.store_states() for engine in self._engines)
        return Outcome(done, steps, ended_s, tuple(sorted(itl.items())), stores)

    def _next_arrival(self, independent: Iterator[int]) -> None:
        which = next(independent, None)
        if which is not None:
            self._at(self._trace[which].arrival_s, ARRIVES, which)

    def _at(self, when_s: float, kind: int, which: int) -> None:
        heapq.heappush(self._events, (when_s, kind, next(self._order), which))

    def _receive(self, now: float, which: int) -> None:
        """All engines are behind one API process: that of the first one."""
        request, overheads = self._trace[which], self._specs[0].overheads
        posted_s = now + overheads.receive_ms / 1e3 + overheads.tokenize_us * request.prompt_tokens / 1e6
        opened = self._open[which] = _Open(now, posted_s, promise=self._promise(request.service_class))
        self._queued[opened.class_name] += 1
        if self._max_queue is not None and self._queued[opened.class_name] > self._max_queue:
            return self._fail(now, which, "the queue is full")
        self._at(posted_s, POSTED, which)

    def _promise(self, name: str) -> Promise | None:
        name = name if name in self._slo.classes else self._slo.usual
        return Promise(name, self._slo.classes[name]) if name else None

    def _post(self, now: float, which: int) -> None:
        opened, request = self._open[which], self._trace[which]
        prompt, opened.output = self._texts.of(request)
        sampling = SamplingParams(max_tokens=request.output_tokens, seed=which, ignore_eos=True)
        model = self._specs[0].plan.model.name
        opened.asked = ApiRequest(
            str(which), "completion", model, (prompt,), 1, sampling, "", (), stream=True, echo=False
        )
        route = self._router.place(opened.asked, self._fleet(now))
        if isinstance(route, Reject):
            self._fail(now, which, route.message)
            return
        opened.left, opened.cached_tokens = _engines_of(route)
        if opened.left and self._is_too_late(now, opened, len(prompt)):
            self._fail(now, which, "its first token is expected too late")
            return
        self._send(now, which, "no engine takes requests")

    def _is_too_late(self, now: float, opened: _Open, prompt_tokens: int) -> bool:
        """On all engines that may get it."""
        if opened.promise is None or not opened.promise.slo.refuse_late:
            return False
        elapsed_ms = (now - opened.arrival_s) * 1e3
        forecasts = [self._forecasts[int(index)] for index in opened.left]
        tokens = max(0, prompt_tokens - opened.cached_tokens)
        return all(each.is_too_late(each.expect(opened.promise, tokens), elapsed_ms) for each in forecasts)

    def _send(self, now: float, which: int, failure: str) -> None:
        """To the next engine that is alive; without one the request ends with ``failure``."""
        opened = self._open[which]
        assert opened.asked is not None
        (prompt,) = opened.asked.prompts
        while opened.left:
            index = int(opened.left.pop(0))
            if not self._alive[index]:
                continue
            opened.engine, opened.share = index, Share(self._loads[index], len(prompt), opened.cached_tokens)
            slo = SloClass() if opened.promise is None else opened.promise.slo
            if opened.promise is not None:
                tokens = max(0, len(prompt) - opened.cached_tokens)
                opened.expected = self._forecasts[index].expect(opened.promise, tokens)
                self._forecasts[index].sent(opened.expected)
            opened.cached_tokens = 0
            if slo.cancel_late:
                self._at(max(now, opened.arrival_s + slo.ttft_ms / 1e3), LATE, which)
            asked = EngineRequest(
                str(which), prompt, opened.asked.sampling, self._trace[which].priority,
                client=self._trace[which].client, ttft_ms=slo.ttft_ms, itl_ms=slo.itl_ms,
            )  # fmt: skip
            self._tell(index, partial(SimulatedEngine.post, at_s=now, request=asked, output=opened.output))
            if isinstance(self._router, RouterTold):
                self._router.begun(opened.asked, str(index))
            return
        self._fail(now, which, failure)

    def _tell(self, index: int, put: Callable[[SimulatedEngine], None]) -> None:
        engine = self._engines[index]
        before = engine.next_s
        put(engine)
        if engine.next_s is not None and engine.next_s != before:
            self._at(engine.next_s, WAKES, index)

    def _cancel(self, now: float, which: int) -> None:
        """Its first token is late."""
        if (opened := self._open.get(which)) is None or opened.share is None or opened.is_cancelled:
            return
        self._deliver(now, opened.engine)
        if not opened.has_begun:
            opened.is_cancelled = True
            self._tell(opened.engine, partial(SimulatedEngine.abort, at_s=now, request_id=str(which)))

    def _fleet(self, now: float) -> tuple[EngineView, ...]:
        """What a router sees: the counts of the API process, which has what has reached it. What engines say of
        themselves is as new; how much of their KV is in use they do not say."""
        for index in range(len(self._engines)):
            self._deliver(now, index)
        waiting = Counter(opened.engine for opened in self._open.values() if not opened.has_begun)
        return tuple([
            EngineView(
                str(index), spec.plan.model.name, alive, load.sequences - waiting[index], waiting[index], 0.0,
                load.sequences, load.queued_tokens, load.running_tokens, spec.plan.block_size,
            )
            for index, (spec, load, alive) in enumerate(zip(self._specs, self._loads, self._alive, strict=True))
        ])  # fmt: skip

    def _deliver(self, now: float, index: int) -> None:
        """Count the tokens that have reached the API process."""
        deliver_s = self._specs[index].overheads.deliver_ms / 1e3
        for at_s, requests, number in self._engines[index].brought(now - deliver_s):
            for name in requests:
                if (opened := self._open.get(int(name))) is not None and opened.share is not None:
                    opened.has_begun = True
                    if opened.expected is not None:
                        self._forecasts[index].first_token(opened.expected, at_s + deliver_s)
                    opened.share.took(number)

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
        opened = self._open[which]
        times = self._engines[engine].forget(output.request_id)
        deliver_s = self._specs[engine].overheads.deliver_ms / 1e3
        loaded = output.timings.loaded if output.timings is not None else {}
        done = _summary(self._trace[which], opened, times, output, deliver_s, loaded)
        if opened.is_cancelled:
            done = _refused(self._trace[which], opened, "its first token was late")
        self._ends(
            done.arrival_s + done.e2e_ms / 1e3 if not done.error else self._engines[engine].clock.now, which, done
        )

    def _fail(self, now: float, which: int, error: str) -> None:
        opened, request = self._open[which], self._trace[which]
        opened.engine, opened.share = NOWHERE, None
        self._ends(now, which, _refused(request, opened, error))

    def _ends(self, when_s: float, which: int, done: SimulatedRequest) -> None:
        opened = self._open[which]
        opened.done, opened.ends_s = done, when_s
        self._at(when_s, ENDS, which)

    def _end(self, now: float, which: int) -> None:
        opened = self._open.get(which)
        if opened is None or opened.done is None or opened.ends_s != now:
            return  # its engine has died before
        done = self._done[which] = opened.done
        del self._open[which]
        self._queued[opened.class_name] -= 1
        if opened.share is not None:
            opened.share.end()
        if opened.expected is not None:
            self._forecasts[opened.engine].first_token(opened.expected, done.arrival_s + done.ttft_ms / 1e3)
        if not done.error and opened.asked is not None:
            answer = {"tokens": tuple(opened.output), "logprobs": (), "finish_reason": "length"}
            self._router.finished(opened.asked, Answer((answer,)))
        for follower in self._followers.pop(self._trace[which].request_id, ()):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._at(now + self._trace[follower].arrival_s, ARRIVES, follower)

    def _die(self, now: float, index: int) -> None:
        """What an engine has begun ends with it; the rest goes to the next one."""
        self._deliver(now, index)
        self._alive[index] = False
        self._engines[index].die(now)
        for which, opened in tuple(self._open.items()):
            if opened.engine != index or opened.share is None:
                continue
            if opened.expected is not None:
                self._forecasts[index].end(opened.expected)
            opened.share.end()
            opened.done, opened.share = None, None
            if opened.has_begun:
                self._fail(now, which, "the engine died")
            else:
                self._send(now, which, "the engine died")


def _engines_of(route: Route) -> tuple[list[str], int]:
    """In the order in which they are tried, and the tokens that the first one is expected to have cached."""
    match route:
        case ToEngine(name):
            return [name], 0
        case Attempts(engines, _, cached):
            return list(engines), sum(cached)
        case Answer() | ToUrl() | Reject():
            raise ValueError(f"the router returned {type(route).__name__}: only engines are simulated")


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    arrival_s: float
    posted_s: float
    engine: int = NOWHERE
    """Which has it."""
    asked: ApiRequest | None = None
    output: Sequence[int] = ()
    left: list[str] = field(default_factory=list)
    """Engines that may take over."""
    cached_tokens: int = 0
    share: Share | None = None
    promise: Promise | None = None
    expected: Expected | None = None
    is_cancelled: bool = False
    has_begun: bool = False
    done: SimulatedRequest | None = None
    """What it will have come to at :attr:`ends_s`."""
    ends_s: float = 0.0

    @property
    def class_name(self) -> str:
        return "" if self.promise is None else self.promise.name

    @property
    def target_ms(self) -> float:
        return 0.0 if self.promise is None else self.promise.slo.ttft_ms


def _summary(
    request: TraceRequest,
    opened: _Open,
    times: TokenTimes,
    output: TokensOut,
    deliver_s: float,
    loaded: Mapping[str, int],
) -> SimulatedRequest:
    timings = output.timings
    if output.finish_reason == "error" or timings is None:
        return _refused(request, opened, output.error)
    first_s, last_s, tokens = times.first_s + deliver_s, times.last_s + deliver_s, times.num_tokens
    return SimulatedRequest(
        arrival_s=opened.arrival_s,
        engine=opened.engine,
        prompt_tokens=request.prompt_tokens,
        output_tokens=tokens,
        cached_tokens=timings.cached_tokens,
        loaded=loaded,
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
        slo_class=opened.class_name,
        ttft_target_ms=opened.target_ms,
        expected_ttft_ms=_expected_ms(opened),
    )


def _expected_ms(opened: _Open) -> float | None:
    expected = opened.expected
    if expected is None or expected.ms is None:
        return None
    return (expected.sent_s - opened.arrival_s) * 1e3 + expected.ms


def _refused(request: TraceRequest, opened: _Open, error: str) -> SimulatedRequest:
    return SimulatedRequest(
        opened.arrival_s,
        opened.engine,
        request.prompt_tokens,
        0,
        error=error,
        service_class=request.service_class,
        slo_class=opened.class_name,
        ttft_target_ms=opened.target_ms,
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
