"""The step loop on a virtual clock, to see what a scheduler does to latency without running a model.

The loop, its rules and its pool of blocks are those that serve; the device computes nothing, and a step takes
``base_ms + per_token_ms * tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.contracts.drafter import Drafter
from engine.contracts.graph import EVERY_TOKEN, KVSpec, Reach
from engine.contracts.kv_allocator import KVAllocator
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.contracts.scheduler import Scheduler
from engine.contracts.step_cost import StepWork
from engine.kv.groups import PoolShape, cache_groups
from engine.loop.core import CoreSettings, EngineCore
from engine.loop.planning import Limits
from engine.loop.step_cost import StepCostModel, StepCostState
from engine.plugin_guard.calls import PluginError
from engine.step.plan import RowResult, StepPlan, StepResult, StepRow
from engine.testing.plain import PlainAllocator


class VirtualClock:
    """Seconds that pass when a device says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class DeviceDrafts:
    """A drafter that lives on a simulated device."""

    placement: Literal["host", "device"] = "device"
    aux_layers: tuple[int, ...] = ()
    kv = None
    kv_lookahead = 0
    weights_bytes = 0

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width

    def start(self, engine: Any) -> None: ...

    def extend(self, step: Any) -> None: ...

    def propose(self, rows: Any) -> Any: ...

    def release(self, row_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A request of the simulation. Times in ms, lengths in tokens."""

    arrives_ms: float
    prompt: int
    output: int
    priority: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    client: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated engine's size and speed."""

    rows: int = 8
    blocks: int = 256
    """Of the KV group that keeps every token."""
    window: int = 0
    """Tokens; not 0: there is a second KV group, whose pool is what an engine makes of ``blocks``."""
    block_size: int = 16
    token_budget: int = 256
    itl_target_ms: float = 0.0
    late_s: float = 0.0
    base_ms: float = 5.0
    per_token_ms: float = 0.1
    num_draft_tokens: int = 0
    """Of each decode: none is accepted."""
    in_flight: int = 1
    """Steps; see :class:`engine.loop.core.CoreSettings`."""

    def ms(self, num_tokens: int) -> float:
        """Of a step."""
        return self.base_ms + self.per_token_ms * num_tokens

    # What steps cost is known from the start, as after an earlier run (:class:`engine.loop.core.Calibration`).

    def load(self) -> StepCostState:
        model = StepCostModel()
        for count in range(1, 33):
            for work in (
                StepWork(count, count, 29 * count * (1 + count % 5)),
                StepWork.chunk(8 * count, 64 * (count % 3)),
            ):
                model.observe(work, self.ms(work.num_tokens))
        return model.state()

    def keep(self, state: StepCostState) -> None: ...


@dataclass(slots=True)
class Trace:
    """What happened to one job."""

    job: Job
    token_ms: list[float] = field(default_factory=list)
    """When each output token was there."""
    preemptions: int = 0

    @property
    def ttft_ms(self) -> float:
        return self.token_ms[0] - self.job.arrives_ms

    @property
    def itl_ms(self) -> list[float]:
        return [after - before for before, after in zip(self.token_ms, self.token_ms[1:])]


class _Device:
    """Fulfils :class:`engine.loop.core.Device`."""

    def __init__(self, clock: VirtualClock, machine: Machine) -> None:
        self._clock, self._machine = clock, machine
        self._free_s = clock.now
        self.step_tokens: list[int] = []

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        tokens = sum(row.num_queries for row in plan.rows)
        self.step_tokens.append(tokens)
        ms = self._machine.ms(tokens)
        self._free_s = done_s = max(self._free_s, self._clock.now) + ms / 1e3
        result = StepResult(plan.plan_id, tuple(map(self._run, plan.rows)), ms)

        def wait() -> StepResult:
            self._clock.now = max(self._clock.now, done_s)
            return result

        return wait

    def _run(self, row: StepRow) -> RowResult:
        return RowResult((0,), 0) if row.samples else RowResult()

    def resume(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Plugins:
    scheduler: Scheduler
    kv_allocator: KVAllocator
    drafter: Drafter


class Simulation:
    """Runs jobs to their end. Raises ``AssertionError`` on a stall or an answer that the loop refuses."""

    def __init__(self, scheduler: Scheduler, machine: Machine, jobs: Sequence[Job]) -> None:
        self._clock = VirtualClock()
        self._device = _Device(self._clock, machine)
        self._core = _core(scheduler, machine, self._device, self._clock)
        self._traces = [Trace(job) for job in sorted(jobs, key=lambda job: job.arrives_ms)]

    @property
    def step_tokens(self) -> list[int]:
        """Of each step: tokens, drafts included."""
        return self._device.step_tokens

    def run(self, max_steps: int = 100_000) -> list[Trace]:
        """The traces, in order of arrival."""
        arrived = 0
        with self._core.warming_up():
            pass  # that is over: the clock stands still
        for _ in range(max_steps):
            if not self._core.has_work and arrived < len(self._traces):
                self._clock.now = max(self._clock.now, self._traces[arrived].job.arrives_ms / 1e3)
            while arrived < len(self._traces) and self._traces[arrived].job.arrives_ms / 1e3 <= self._clock.now:
                self._core.submit(_request(arrived, self._traces[arrived].job))
                arrived += 1
            if not self._core.has_work:
                self._core.check_idle()
                return self._traces
            try:
                outputs = self._core.step().outputs
            except PluginError as error:
                raise AssertionError(f"at {1e3 * self._clock.now} ms: {error}") from error
            for output in outputs:
                self._record(output)
        raise AssertionError(f"requests are not done after {max_steps} steps")

    def _record(self, output: TokensOut) -> None:
        assert not output.error, output.error
        trace = self._traces[int(output.request_id)]
        trace.token_ms += [1e3 * output.at_s] * len(output.tokens)
        if output.timings is not None:
            trace.preemptions = output.timings.preemptions


def _request(number: int, job: Job) -> EngineRequest:
    sampling = SamplingParams(max_tokens=job.output, ignore_eos=True)
    return EngineRequest(
        str(number), (0,) * job.prompt, sampling, job.priority,
        client=job.client, ttft_ms=job.ttft_ms, itl_ms=job.itl_ms,
    )  # fmt: skip


def _core(scheduler: Scheduler, machine: Machine, device: _Device, clock: VirtualClock) -> EngineCore:
    reaches = (EVERY_TOKEN, *((Reach("window", machine.window),) if machine.window else ()))
    caches, max_len = cache_groups([KVSpec(1, 1, reach) for reach in reaches]), machine.blocks * machine.block_size
    shape = PoolShape(
        reaches, (1,) * len(reaches), machine.block_size, max_len, machine.token_budget + machine.num_draft_tokens + 1,
        machine.rows, caches.full_share, caches_prefixes=False,
    )  # fmt: skip
    groups = shape.groups(caches, machine.blocks + 1)
    allocator = PlainAllocator(machine.block_size)
    allocator.start(groups)
    settings = CoreSettings(
        max_len, machine.rows, machine.block_size, groups, vocab_size=1, eos_token_ids=(), namespace="", seed=0,
        limits=Limits(machine.token_budget, machine.itl_target_ms, late_s=machine.late_s), in_flight=machine.in_flight,
        max_width=machine.num_draft_tokens, adaptive_drafts=False, calibration=machine,
    )  # fmt: skip
    plugins = _Plugins(scheduler, allocator, DeviceDrafts(machine.num_draft_tokens))
    return EngineCore(plugins, device, settings, clock)
