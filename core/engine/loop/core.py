"""The engine core: requests in, steps, tokens out. Single-threaded; knows no sockets, no tokenizer and no server.

step():  plan -> launch -> (overlap: plan and launch one more) -> wait for the oldest -> commit
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from engine.contracts.drafter import Drafter, on_device
from engine.contracts.events import Event, StepEvent
from engine.contracts.kv_allocator import KVAllocator, KVGroup
from engine.contracts.kv_store import KVStore
from engine.contracts.request import EngineRequest, FinishReason, SamplingParams, TokensOut
from engine.contracts.scheduler import Scheduler
from engine.contracts.step_cost import Mixture, StepCost
from engine.drafting.policy import DraftPolicy
from engine.kv.block_keys import BlockKeys
from engine.loop.commit import Committer
from engine.loop.drafting import Drafted, Drafting
from engine.loop.forcing import MatcherOf
from engine.loop.ledger import InFlight, Ledger
from engine.loop.messages import CauseOfDeath, EngineStats, GroupBlocks, Heartbeat, StepOutputs
from engine.loop.planning import Limits, Planner
from engine.loop.pool import Pool
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status
from engine.loop.step_cost import StepCostModel, StepCostState
from engine.loop.step_work import contents_of
from engine.loop.storing import StoreMoves
from engine.loop.tiers import Tiers
from engine.plugin_guard.calls import contract_error, describe_error
from engine.step.plan import (
    DeviceBroken,
    DrafterBroken,
    RankFailed,
    RecordMove,
    StepPlan,
    StepResult,
    StepSkipped,
)

Clock = Callable[[], float]
"""Seconds, never going back: :func:`time.monotonic`, or a simulator's."""

FAILURES_PER_PROBE = 3
"""Requests that fail before a request of the engine's own shows whether it is they or the engine."""
REPORT_EVERY = 64
"""Steps."""
KEEP_EVERY_S = 300.0
"""Step costs are kept when the engine is idle, no more often than this, and at its end."""
STORES_S = 5.0
"""How long stores may take to end what they write, at the engine's end."""
MOST_FAILED_PROBES = 3
"""Such requests that fail, one after another, before the engine is declared broken."""
PROBE = EngineRequest(
    "engine-probe", (0,), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), priority=-(2**31)
)
"""Anything that works serves it: a few tokens, so that drafts are asked for, too."""


class LoopPlugins(Protocol):
    """Those that the loop asks: of :class:`engine.assembly.bind.BoundEngine`, or a simulator's."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def kv_allocator(self) -> KVAllocator:
        """Started."""
        ...

    @property
    def drafter(self) -> Drafter: ...


class EngineBroken(RuntimeError):
    """The device or a plugin fails whatever it is given."""

    def __init__(self, why: str, cause: CauseOfDeath = "engine_dead") -> None:
        super().__init__(why)
        self.cause: CauseOfDeath = cause


def _of_device(error: DeviceBroken) -> EngineBroken:
    return EngineBroken(str(error), "rank_failed" if isinstance(error, RankFailed) else "device_failed")


class Device(Protocol):
    """What executes steps, strictly in order: :class:`engine.step.runner.DeviceQueue`, or a simulator."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a step; the returned function waits for its result and raises what the step raised."""
        ...

    def resume(self) -> None:
        """Execute steps again after a failure: everything queued after it was skipped."""
        ...

    def close(self) -> None: ...


class Calibration(Protocol):
    """Where fitted step costs are kept, as :class:`engine.startup.calibration.Calibration`."""

    def load(self) -> StepCostState | None: ...

    def keep(self, state: StepCostState) -> None: ...


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the loop needs to know of a plan."""

    max_len: int
    max_requests: int
    block_size: int
    groups: tuple[KVGroup, ...]
    """As the allocator was started with."""
    vocab_size: int
    limits: Limits
    in_flight: int
    """Steps launched before the first of them is waited for: 1 plain, 2 overlap, more for pipeline stages."""
    eos_token_ids: tuple[int, ...]
    namespace: str
    """Of block keys: what cached keys and values depend on beside tokens."""
    seed: int
    max_width: int
    """Most drafts per request and step."""
    adaptive_drafts: bool
    mixtures: tuple[Mixture, ...] = ()
    """Of the model: what steps cost depends on them."""
    calibration: Calibration | None = None


class EngineCore:
    """Everything between a submitted request and its tokens."""

    def __init__(
        self,
        bound: LoopPlugins,
        device: Device,
        settings: CoreSettings,
        clock: Clock = time.monotonic,
        matcher_of: MatcherOf | None = None,
    ) -> None:
        """``matcher_of``: of outputs whose forced tokens a drafter on the host drafts."""
        self._device = device
        self._settings = settings
        self._clock = clock
        self._eos = frozenset(settings.eos_token_ids)
        self._caches = bound.kv_allocator.caches_prefixes
        self._drafter = bound.drafter
        self._num_unread: Callable[[], int] = int
        self.wake: Callable[[], None] = lambda: None
        """Ends a sleep of the loop; may be called from any thread."""
        self._arrivals = 0
        self._steps = 0
        self._failures = 0
        """Requests that failed since the last probe."""
        self._failed_probes = 0
        self._outputs: list[TokensOut] = []
        self._events: list[Event] = []
        self._cost = StepCostModel(settings.mixtures)
        self._cost_at_start = self._cost.cost()
        """Measured while warming up: too high rather than too low, and all there is before the first step unless an
        earlier run has measured."""
        self._cost_kept_s = clock()
        self._cost_report = self._cost.report()
        self._step_began_s: float | None = None
        self._expected_ms = 0.0
        self._ledger = Ledger()
        self._queues = Queues(settings.max_requests)
        device_drafter = on_device(bound.drafter)
        self._pool = Pool(
            bound.kv_allocator,
            settings.groups,
            settings.max_requests,
            settings.block_size,
            settings.limits.token_budget,
            self._ledger,
            on_row_free=bound.drafter.release,
            kv_lookahead=0 if device_drafter is None else device_drafter.kv_lookahead,
        )
        policy = DraftPolicy(min(settings.max_width, bound.drafter.max_width), settings.adaptive_drafts)
        self._drafting = Drafting(bound.drafter, policy, settings.vocab_size, matcher_of)
        self._planner = Planner(
            bound.scheduler,
            self._queues,
            self._pool,
            self._drafting,
            settings.limits,
            lambda: self._cost.cost(),
            self._events.append,
            lambda sequence, why: self._committer.finish(sequence, "error", why),
            clock,
        )
        self._committer = Committer(self._queues, self._pool, self._publish, clock)

    @property
    def namespace(self) -> str:
        return self._settings.namespace

    @property
    def max_draft_tokens(self) -> int:
        return self._drafting.max_width

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Meanwhile a drafter always drafts as far as it may; what steps cost is then what an earlier run measured."""
        with self.drafting(self.max_draft_tokens):
            yield
        calibration = self._settings.calibration
        state = None if calibration is None else calibration.load()
        self._cost_at_start, self._cost = self._cost.cost(), StepCostModel(self._settings.mixtures, state)
        self._cost_report = self._cost.report()

    @contextlib.contextmanager
    def drafting(self, num_drafts: int) -> Iterator[None]:
        """Meanwhile so many drafts are wanted of each request, as far as it goes on; nothing is learnt from them."""
        with self._drafting.always(num_drafts):
            yield

    # Requests ---------------------------------------------------------------------------------------------------

    def count_as_waiting(self, num_unread: Callable[[], int]) -> None:
        """Sequences that have arrived and were not submitted yet wait, too: ``num_unread()`` says how many."""
        self._num_unread = num_unread

    def submit(self, request: EngineRequest, arrived_s: float | None = None) -> None:
        """Queue a request. One that can never run is answered with ``finish_reason="error"`` at the next step.
        ``arrived_s``: since when it waits, ``None``: now."""
        sampling, refusal = request.sampling, self._refusal(request)
        if refusal is not None:
            self._outputs.append(TokensOut(request.request_id, finish_reason="error", error=refusal))
            return
        self._arrivals += 1
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            seed=sampling.seed if sampling.seed is not None else _mix(self._settings.seed, self._arrivals),
            stop_ids=self._stop_ids(sampling),
            max_total=min(len(request.prompt) + max(sampling.max_tokens, 1), self._settings.max_len),
            submitted_s=self._clock() if arrived_s is None else arrived_s,
            tokens=[*request.prompt, *request.output],
        )
        if self._caches and sampling.prompt_logprobs is None:
            sequence.keys = BlockKeys((self._settings.namespace, request.cache_salt), self._settings.block_size)
        self._queues.add(sequence)

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own_end = sampling.ignore_eos and sampling.grammar is None
        return frozenset(sampling.stop_token_ids) | (frozenset() if own_end else self._eos)

    def _refusal(self, request: EngineRequest) -> str | None:
        if not request.prompt:
            return "the prompt is empty"
        if request.request_id in self._queues.by_id:
            return f"request id {request.request_id!r} is already in use"
        most = self._settings.max_len - min(request.sampling.max_tokens, 1)
        if len(request.prompt) > most:
            return f"the prompt has {len(request.prompt)} tokens, at most {most} fit"
        left = min(request.sampling.max_tokens, self._settings.max_len - len(request.prompt)) - len(request.output)
        if request.output and left < 1:
            return f"the output has {len(request.output)} tokens already, and may have {len(request.output) + left}"
        return None

    def abort(self, request_ids: SequenceOf[str], reason: FinishReason = "abort") -> None:
        """End requests; unknown or ended ones are ignored."""
        for request_id in request_ids:
            sequence = self._queues.by_id.get(request_id)
            if sequence is not None:
                self._committer.finish(sequence, reason)

    # Steps ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Something is queued, running, in flight or waiting to be sent."""
        return bool(self._queues.by_id or self._ledger or self._outputs)

    def keep_records(
        self, names: SequenceOf[str], stores: SequenceOf[KVStore], num_bytes: SequenceOf[int], store: StoreMoves
    ) -> None:
        """From now on find and keep records of blocks in stores, of which the first is memory. ``num_bytes``: of a
        record, by group; ``store`` copies blocks to slots."""
        pool, settings = self._pool, self._settings

        def store_and_wake(moves: SequenceOf[RecordMove], done: Callable[[bool], None]) -> None:
            def stored(well: bool) -> None:
                done(well)
                self.wake()  # a loop at rest publishes what its last step computed

            store(moves, stored)

        parts = pool.allocator, settings.groups, settings.block_size
        pool.tiers = Tiers(names, stores, num_bytes, *parts, store_and_wake, self._clock, self._cost_at_start)

    def take_stored(self) -> None:
        """See what stores have done."""
        tiers = self._pool.tiers
        if tiers is not None:
            tiers.poll()
            if tiers.others_forgot():
                self._pool.reset_cache()

    def rest_s(self) -> float:
        """How long the loop may sleep until it is woken: 0 unless every request that may run waits for records."""
        if self._pool.tiers is None or self._ledger or self._outputs or self._queues.running:
            return 0.0
        if not self._queues.by_id:
            return 0.0
        now = self._clock()
        reads = [s.read for s in self._queues.admissible()]
        if any(read is None or not read.waits(now) for read in reads):
            return 0.0
        self._pool.tiers.rest()
        waited = [read for read in reads if read is not None]
        waited[0].comes_next(now)
        return max(0.0, min(read.deadline_s for read in waited) - now)

    def step(self) -> StepOutputs:
        """Launch what can be launched, wait for the oldest step in flight, commit it."""
        self.take_stored()
        cost = self._cost.cost()
        cost = cost if cost.num_samples else self._cost_at_start
        self._expected_ms = sum(cost.ms(step.contents.work) for step in self._ledger)
        self._step_began_s = self._clock()
        while len(self._ledger) < self._settings.in_flight and self._queues.by_id and self._launch(cost):
            pass
        if self._ledger:
            self._collect()
        if self._failures >= FAILURES_PER_PROBE and PROBE.request_id not in self._queues.by_id:
            self._failures = 0
            self.submit(PROBE)
        if not self._queues.by_id and self._clock() - self._cost_kept_s >= KEEP_EVERY_S:
            self._keep_cost()
        outputs = self._flush()
        self._step_began_s = None
        return outputs

    def heartbeat(self) -> Heartbeat:
        """How the step in hand is getting on. May be called from any thread."""
        began = self._step_began_s
        return Heartbeat() if began is None else Heartbeat(self._clock() - began, self._expected_ms / 1e3)

    def _launch(self, cost: StepCost) -> bool:
        """``cost``: what is believed of steps."""
        started = self._clock()
        follows_on = bool(self._queues.running)
        planned = self._planner.plan(something_in_flight=len(self._ledger) > 0)
        if planned is None:
            return False
        rows = zip(planned.plan.rows, planned.owners, strict=True)
        contents = contents_of((row, sequence) for row, (sequence, _) in rows)
        self._expected_ms += cost.ms(contents.work)  # said before: a device without a thread computes in its launch
        self._ledger.launched(
            InFlight(
                plan=planned.plan,
                contents=contents,
                owners=planned.owners,
                planning_ms=(self._clock() - started) * 1e3,
                asked=planned.asked,
                draft_ms=planned.draft_ms if self._drafting.on_host else 0.0,
                wait=self._device.launch(planned.plan),
                started_s=started,
                preemptions=planned.preemptions,
                follows_on=follows_on,
            )
        )
        return True

    def _collect(self) -> None:
        step = self._ledger.oldest()
        try:
            result = step.wait()
        except Exception as error:
            self._recover(step, error)
            return
        self._steps += 1
        if self._steps % REPORT_EVERY == 0:
            self._cost_report = self._cost.report()
        started = self._clock()
        drafted = self._committer.commit(step, result)
        self._ledger.retire()
        self._absolve(step)
        if step.plan.loads and self._pool.tiers is not None:
            self._pool.tiers.load_bound.observe(step.plan.loads, result.load_ms)
        gap_ms = result.idle_ms if step.follows_on else None
        self._cost.observe(step.contents.work, result.device_ms, gap_ms)
        self._drafting.observe(step.plan, drafted, result, gap_ms)
        if self._drafting.max_width:
            self._cost.observe_drafts(self._drafting.sample(step.plan, step.draft_ms, drafted, result))
        now = self._clock()
        self._events.append(self._step_event(step, result, now, (now - started) * 1e3, drafted))

    def _step_event(
        self, step: InFlight, result: StepResult, now: float, commit_ms: float, drafted: Drafted
    ) -> StepEvent:
        plan, contents, work = step.plan, step.contents, step.contents.work
        used = tuple([(blocks.group, blocks.used) for blocks in self._blocks()])
        return StepEvent(
            at_s=now,
            step=self._steps,
            duration_ms=(now - step.started_s) * 1e3,
            host_ms=step.planning_ms + commit_ms,
            device_ms=result.device_ms,
            gap_ms=result.idle_ms if step.follows_on else 0.0,
            num_requests=work.num_rows,
            num_prefill_tokens=work.num_tokens - contents.decode_tokens,
            num_decode_tokens=contents.decode_tokens,
            running=len(self._queues.running),
            waiting=self._num_waiting,
            kv_used=max([share for _, share in used]),
            kv_groups_used=used,
            drafted=drafted.drafted,
            accepted=drafted.accepted,
            num_draft_tokens=max((row.num_drafts for row in plan.rows), default=0),
            draft_chains=drafted.chains,
            draft_ms=step.draft_ms + result.draft_ms,
            drafts_tried=tuple(drafted.tried),
            drafts_accepted=tuple(drafted.accepted_at),
            preemptions=step.preemptions,
            decode_context=work.decode_context,
            prefill_context=work.prefill_context,
            chunks=contents.chunks,
            captured=result.captured,
        )

    # Failure ----------------------------------------------------------------------------------------------------

    def _recover(self, step: InFlight, error: Exception) -> None:
        """A step raised. Roll everything back to what is confirmed; then its requests run one by one, so that only
        the guilty one fails. Whether the engine is guilty, a probe shows."""
        if isinstance(error, DeviceBroken):
            raise _of_device(error) from error
        if isinstance(error, DrafterBroken):
            raise contract_error(self._drafter, "propose", str(error)) from error
        traceback.print_exception(error)
        owners = [s for s, epoch in step.owners if s.epoch == epoch and s.status is Status.RUNNING]
        try:
            self._drain()
        except DeviceBroken as device:
            raise _of_device(device) from device
        self._device.resume()
        for sequence in self._queues.running:
            sequence.roll_back()
        suspects = self._planner.suspects
        if len(step.plan.rows) == 1 and len(owners) == 1:
            if owners[0] in suspects:
                suspects.remove(owners[0])
            self._committer.finish(owners[0], "error", describe_error(error))
        else:
            suspects.extend(s for s in owners if s not in suspects)

    def _drain(self) -> None:
        """Retire everything in flight after a failure; what was queued after it was skipped. Raises
        :class:`DeviceBroken` if one of these steps does."""
        broken: DeviceBroken | None = None
        while self._ledger:
            try:
                self._ledger.oldest().wait()
            except DeviceBroken as error:
                broken = error
            except StepSkipped:
                pass
            except Exception as error:
                traceback.print_exception(error)  # its requests run again, and fail again if they are its cause
            self._ledger.retire()
        if broken is not None:
            raise broken

    def _absolve(self, step: InFlight) -> None:
        """A step went well: a suspect that ran alone is cleared."""
        suspects = self._planner.suspects
        if suspects and any(sequence is suspects[0] for sequence, _ in step.owners):
            suspects.popleft()

    def _publish(self, output: TokensOut) -> None:
        if output.request_id == PROBE.request_id:
            self._take_probe(output)
            return
        self._outputs.append(output)
        self._failures += output.finish_reason == "error"

    def _take_probe(self, output: TokensOut) -> None:
        if output.finish_reason == "error":
            self._failures = FAILURES_PER_PROBE
            self._failed_probes += 1
            if self._failed_probes == MOST_FAILED_PROBES:
                raise EngineBroken(f"requests fail, and so do those of the engine's own: {output.error}")
        elif output.finish_reason is not None:
            self._failed_probes = 0

    # State ------------------------------------------------------------------------------------------------------

    def _flush(self) -> StepOutputs:
        outputs, events = tuple(self._outputs), tuple(self._events)
        self._outputs.clear()
        self._events.clear()
        return StepOutputs(outputs, events, self.stats())

    def _blocks(self) -> tuple[GroupBlocks, ...]:
        groups = zip(self._pool.groups, self._pool.allocator.usage(), strict=True)
        return tuple([GroupBlocks(group.name, u.total, u.free, u.cached, u.leased) for group, u in groups])

    @property
    def _num_waiting(self) -> int:
        return len(self._queues.waiting) + self._num_unread()

    def stats(self) -> EngineStats:
        return EngineStats(
            at_s=self._clock(),
            step=self._steps,
            running=len(self._queues.running),
            waiting=self._num_waiting,
            blocks=self._blocks(),
            rows_used=self._pool.num_rows - self._pool.free_rows,
            stores=() if self._pool.tiers is None else self._pool.tiers.states(self._cost.cost()),
            step_cost=self._cost_report,
        )

    def _keep_cost(self) -> None:
        self._cost_kept_s = self._clock()
        if self._settings.calibration is not None:
            self._settings.calibration.keep(self._cost.state())

    def reset_prefix_cache(self) -> None:
        self._pool.reset_cache()

    def check_idle(self) -> None:
        """Nobody runs: all rows and blocks must be back. Raises :class:`~engine.plugin_guard.calls.PluginError`."""
        assert self._pool.free_rows == self._pool.num_rows
        self._pool.allocator.check_idle()

    def close(self) -> None:
        """Abort everything, wait for the device, give everything back."""
        self.abort(list(self._queues.by_id))
        with contextlib.suppress(DeviceBroken):
            self._drain()
        self._keep_cost()
        self._device.close()
        if self._pool.tiers is not None:
            self._pool.tiers.poll()  # of the last steps
            self._pool.tiers.close(STORES_S)


def _mix(seed: int, number: int) -> int:
    """A 63-bit seed from the engine's seed and a running number (SplitMix64 finaliser)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
