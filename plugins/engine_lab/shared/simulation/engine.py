"""One simulated engine process: the real loop on a virtual clock, and the messages it has not read yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, nextafter

from engine.assembly.bind import build_context, build_slots, describe_model
from engine.contracts.drafter import Drafter
from engine.contracts.events import Event, StepEvent
from engine.contracts.kv_allocator import KVAllocator
from engine.contracts.request import EngineRequest, TokensOut
from engine.contracts.scheduler import Scheduler
from engine.kv.groups import PoolShape, cache_groups
from engine.loop.core import CoreSettings
from engine.loop.messages import StoreState
from engine.loop.planning import Limits
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.device import SimulatedDevice, Timed
from engine_lab.shared.simulation.drafters import stand_in
from engine_lab.shared.simulation.fast_forward import FastForwardCore
from engine_lab.shared.simulation.outcome import SimulatedSteps
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.shared.simulation.stores import Stores, open_stores
from engine_lab.shared.simulation.texts import NUM_TOKENS


@dataclass(frozen=True, slots=True)
class _Plugins:
    scheduler: Scheduler
    kv_allocator: KVAllocator
    drafter: Drafter


@dataclass(slots=True)
class TokenTimes:
    """When a request got its tokens."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


class SimulatedEngine:
    """Serves requests that are posted to it, up to the moment :attr:`next_s`, again and again."""

    def __init__(self, spec: EngineSpec, seed: int, leap: bool) -> None:
        self.clock = VirtualClock()
        self.next_s: float | None = None
        """When it goes on by itself; ``None``: it has nothing to do."""
        self.token_times: dict[str, TokenTimes] = {}
        """Of the requests in the engine, by id."""
        self.itl_us: Counter[int] = Counter()
        self.steps = SimulatedSteps()
        self._inbox: list[tuple[float, EngineRequest | str]] = []
        """With when it came: a request, or the id of one that is aborted."""
        self._brought: deque[tuple[float, tuple[str, ...], int]] = deque()
        self._leaps = leap
        self._foreseen: list[Timed] = []
        self._device = SimulatedDevice(self.clock, spec.step_cost, spec.drafts, seed)
        self._core, self._stores = make_core(spec, self._device, self.clock)
        self._after = spec.plan.in_flight - 1

    def post(self, at_s: float, request: EngineRequest, output: Sequence[int]) -> None:
        """A message reaches the process, which reads it between two steps. ``output``: what the request, which has a
        seed of its own, will answer."""
        assert request.sampling.seed is not None
        self._device.outputs[request.sampling.seed] = output
        self.token_times[request.request_id] = TokenTimes()
        self._put(at_s, request)

    def abort(self, at_s: float, request_id: str) -> None:
        """A message that ends a request."""
        self._put(at_s, request_id)

    def _put(self, at_s: float, message: EngineRequest | str) -> None:
        self._inbox.append((at_s, message))
        if self.next_s is None:
            self.clock.now = self.next_s = max(at_s, self.clock.now)
        elif self._foreseen:
            self._leap_to(at_s)
            self.next_s = self.clock.now
        else:
            self.next_s = min(self.next_s, max(at_s, self.clock.now))

    def run(self) -> Sequence[TokensOut]:
        """What happens at :attr:`next_s`. Returns what left the engine; its clock says when."""
        if self._foreseen:
            self._leap(self._longest)
        assert self.next_s is not None
        self.clock.now = max(self.clock.now, self.next_s)
        self._device.end_copies()
        for arrived_s, message in self._inbox:
            if isinstance(message, str):
                self._core.abort([message])
            else:
                self._core.submit(message, arrived_s)
        self._inbox.clear()
        done = self._core.step()
        self._count(done.events)
        for output in done.outputs:
            self._record(output)
        self._foreseen = self._core.foresee() if self._leaps else []
        if self._foreseen:
            self.next_s = self._foreseen[self._longest - 1].done_s
        else:
            self.next_s = self._rests_until()
        return done.outputs

    def _rests_until(self) -> float | None:
        """When it goes on after a step: at once, unless all that it could do waits for KV stores."""
        now = self.clock.now
        rest_s = self._core.rest_s() if self._core.has_work else inf
        if not rest_s:
            return now
        read_s = min([store.next_s for store in self._stores.staged], default=inf) if self._stores else inf
        until_s = min(max(now, read_s), nextafter(now + rest_s, inf))
        return None if until_s == inf else until_s

    def store_states(self) -> tuple[StoreState, ...]:
        """Of its KV stores."""
        return self._core.stats().stores

    def brought(self, before_s: float) -> Iterator[tuple[float, tuple[str, ...], int]]:
        """When which requests got tokens before a moment that has passed, and how many each; every token once."""
        steps = bisect_left(self._foreseen, before_s, key=lambda timed: timed.done_s)
        if steps:
            left = self._foreseen[steps:]
            self._leap(steps)
            self._foreseen = left
        while self._brought and self._brought[0][0] < before_s:
            yield self._brought.popleft()

    def die(self, at_s: float) -> None:
        """It does nothing after a step that is running."""
        self._leap_to(at_s)
        self.next_s = None

    def _leap_to(self, at_s: float) -> None:
        """The end of the step that runs at a moment."""
        if self._foreseen and at_s > self.clock.now:
            self._leap(1 + bisect_left(self._foreseen, at_s, key=lambda timed: timed.done_s))
        self._foreseen = []

    @property
    def _longest(self) -> int:
        """Steps of the longest leap: those in flight after it end later."""
        return len(self._foreseen) - self._after

    def forget(self, request_id: str) -> TokenTimes:
        """A request has ended."""
        del self._device.outputs[int(request_id)]
        return self.token_times.pop(request_id)

    def _leap(self, num_steps: int) -> None:
        rows = self._core.leap(self._foreseen, num_steps)
        ended_s = [timed.done_s for timed in self._foreseen[:num_steps]]
        for sequence in rows:
            times = self.token_times[sequence.request_id]
            self.itl_us[_us(ended_s[0] - times.last_s)] += 1
            times.last_s = ended_s[-1]
            times.num_tokens += num_steps
        requests = tuple([sequence.request_id for sequence in rows])
        self._brought.extend([(at_s, requests, 1) for at_s in ended_s])
        for before, after in pairwise(ended_s):
            self.itl_us[_us(after - before)] += len(rows)
        for timed in self._foreseen[:num_steps]:
            self._count_step(timed.device_ms + timed.draft_ms, timed.idle_ms, 0, len(rows))
        self._foreseen = []
        self.steps.most_kv_used = max(self.steps.most_kv_used, self._core.kv_used())

    def _record(self, output: TokensOut) -> None:
        """Count the tokens of one request that a step brought."""
        times, count = self.token_times[output.request_id], len(output.tokens)
        if not count:
            return
        self._brought.append((output.at_s, (output.request_id,), count))
        if times.num_tokens:
            self.itl_us[_us((output.at_s - times.last_s) / count)] += count
        else:
            times.first_s = output.at_s
        times.last_s = output.at_s
        times.num_tokens += count

    def _count(self, events: Sequence[Event]) -> None:
        steps = self.steps
        for event in events:
            if isinstance(event, StepEvent):
                ms = event.device_ms + event.draft_ms
                self._count_step(ms, event.gap_ms, event.num_prefill_tokens, event.num_decode_tokens)
                steps.most_running = max(steps.most_running, event.running)
                steps.most_waiting = max(steps.most_waiting, event.waiting)
                steps.most_kv_used = max(steps.most_kv_used, event.kv_used)
                steps.preemptions += event.preemptions

    def _count_step(self, busy_ms: float, gap_ms: float, prefill_tokens: int, decode_tokens: int) -> None:
        steps = self.steps
        steps.num_steps += 1
        steps.busy_ms += busy_ms
        steps.gap_ms += gap_ms
        steps.prefill_tokens += prefill_tokens
        steps.decode_tokens += decode_tokens


def _us(seconds: float) -> int:
    return int(seconds * 1e6 + 0.5)


def make_core(spec: EngineSpec, device: SimulatedDevice, clock: VirtualClock) -> tuple[FastForwardCore, Stores | None]:
    """The loop of an engine around a simulated device, and its KV stores."""
    plan = spec.plan
    context = replace(build_context(plan), clock=clock)
    built = build_slots(plan, ("scheduler", "kv_allocator"), context)
    (scheduler,), (allocator,) = built["scheduler"], built["kv_allocator"]
    limits, drafting = plan.scheduler, plan.drafter
    caches = cache_groups(describe_model(plan).graph.caches, dcp=plan.layout.dcp)
    max_width = drafting.max_width if spec.drafts is not None else 0
    pool = PoolShape(
        caches.reaches,
        (0,) * caches.num_groups,
        plan.block_size,
        plan.max_len,
        limits.token_budget + max_width + 1,
        context.max_requests,
        caches.full_share,
        allocator.caches_prefixes,
        for_one=-(-plan.max_len // plan.block_size) if plan.settings.memory.kv_tokens is None else 0,
    )
    groups = pool.groups(caches, spec.num_blocks)
    allocator.start(groups)
    settings = CoreSettings(
        max_len=plan.max_len,
        max_requests=context.max_requests,
        block_size=plan.block_size,
        groups=groups,
        vocab_size=NUM_TOKENS,
        limits=Limits(
            limits.token_budget,
            limits.itl_target_ms,
            plan.in_flight if plan.layout.pp > 1 else 1,
            plan.settings.slo.late_s,
        ),
        in_flight=plan.in_flight,
        eos_token_ids=(),
        namespace="simulated",
        seed=0,
        max_width=max_width,
        adaptive_drafts=drafting.adaptive,
    )
    plugins = _Plugins(scheduler, allocator, stand_in(spec.drafts, max_width))
    core = FastForwardCore(plugins, device, settings, clock)
    stores = open_stores(spec, context, caches, clock)
    if stores is not None:
        device.copies_records(stores.num_bytes, spec.rate(stores.names[0]))
        core.keep_records(stores.names, stores.all, stores.num_bytes, device.store)
    return core, stores
