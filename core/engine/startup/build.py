"""From a plan to a running engine core: bind, load, size the cache, warm up. Every phase is timed and reported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from engine.assembly.bind import BoundEngine, bind, build_slots, config_of
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.config import DrafterConfig, SchedulerConfig
from engine.contracts.drafter import DeviceDrafter, aux_layers_of, cached_by, may_be_captured, on_device
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.quantizer import Quantizer
from engine.drafting.behind import Drafts
from engine.drafting.graphs import DraftGraphs, NotCapturable, draft_buckets
from engine.drafting.lent import DraftEngine, DraftLoading
from engine.kernels.backends import kernels_for
from engine.kernels.cpu import layer_ops, row_ops
from engine.kernels.cpu.captured import capture_steps
from engine.kernels.cpu.memory import give_back_freed_memory, keep_freed_memory
from engine.kernels.loading import load_model
from engine.kernels.model import LoweredModel
from engine.kv.cache import KVCache
from engine.kv.groups import CacheGroups, cache_groups
from engine.loop.core import CoreSettings, EngineCore
from engine.loop.messages import EngineInfo, Phase, Progress
from engine.loop.planning import Limits
from engine.models.footprint import mixtures
from engine.models.record import recorded
from engine.startup.checks import check_attention, check_drafter, check_parallelism, check_pool, try_plugins
from engine.startup.memory.budget import DoesNotFit, Meter, free_memory
from engine.startup.memory.fit import KVPoolSize, MemoryPlan, plan_memory, size_pool
from engine.startup.memory.ledger import make_ledger
from engine.startup.memory.profile_run import profile_run
from engine.startup.warm_up import warm_up, warm_up_launches
from engine.step.graphs import Bucket, Capture, StepGraphs, cuda_capture, query_buckets, row_buckets
from engine.step.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.step.tables import DeviceTables

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that is ready, and what is known about it."""

    core: EngineCore
    info: EngineInfo
    bound: BoundEngine


class _Phases:
    def __init__(self, on_progress: OnProgress, meter: Meter) -> None:
        self.done: list[Phase] = []
        self._on_progress = on_progress
        self.meter = meter

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._on_progress(Progress(name, 0.0))
        self.meter.reset_peak()
        started = time.monotonic()
        yield
        seconds, start = round(time.monotonic() - started, 3), self.meter.start
        self.done.append(Phase(name, seconds, self.meter.used() - start, self.meter.peak() - start))
        self._on_progress(Progress(name, 1.0))


def build_engine(
    plan: EnginePlan,
    on_progress: OnProgress = lambda progress: None,
    free: Callable[[DeviceFacts], int] = free_memory,
) -> Engine:
    """Build everything the plan names, in this process. ``free`` says how many bytes are free on a device.

    Raises :class:`DoesNotFit`, before any weight is read where that can be known, and what plugins raise.
    """
    torch.set_num_threads(plan.settings.threads or len(os.sched_getaffinity(0)))
    if plan.device.kind == "cpu":
        keep_freed_memory()  # before the device's thread is started
    phase = _Phases(on_progress, Meter(plan.device.kind))
    with phase("bind plugins"):
        bound = bind(plan)
        check_parallelism(plan, bound)
        check_attention(plan, bound)
        check_drafter(plan, bound)
    with phase("plan memory"):
        memory = plan_memory(plan, bound, free=free(plan.device))
    if plan.execution == "compile" and plan.device.kind == "cpu":
        with phase("build kernels"):
            layer_ops.kernels()
            row_ops.kernels()
    # A GPU works by itself once kernels are launched; a CPU needs a thread that computes.
    worker = DeviceWorker(own_thread=plan.overlap and plan.device.kind == "cpu")
    with phase("try plugins"):
        worker.start(partial(try_plugins, plan, bound))()
    with phase("load weights"):
        model = worker.start(partial(load_plan, plan, bound, on_progress))()
    in_graphs = plan.execution == "graphs" and not model.waits
    if plan.device.kind == "cuda":
        with phase("profile run"):
            buckets = graph_buckets(bound) if in_graphs else []
            memory = profile_run(memory, bound, model, buckets, cuda_capture(), free, phase.meter)
    with phase("allocate cache"):
        found = cache_groups(model.graph.caches, cached_by(bound.drafter))
        pool = size_pool(memory, model.weights_bytes, free(plan.device))
        groups, max_len = memory.estimate.pool.groups(found, pool.blocks), pool.max_len
        bound.kv_allocator.start(groups)
        check_pool(bound.kv_allocator, groups)
        runner = worker.start(partial(_make_runner, plan, bound, model, found, groups, max_len))()
    drafts = drafts_of(runner)
    if drafts is not None:
        with phase("load drafter"):
            worker.start(partial(start_drafter, plan, bound, drafts.drafter, runner))()
    if in_graphs:
        with phase("capture graphs"):
            capture_graphs(runner, bound, cuda_capture(), on_progress)
    core = make_core(plan, bound, DeviceQueue(runner, worker), groups, max_len)
    with phase("warm up"):
        if plan.device.kind == "cuda":
            warm_up_launches(core, runner, max_len, int(plan.choice("scheduler").config["token_budget"]))
        warm_up(core, max_len)
        core.check_idle()
    info = _describe(model, runner, memory, pool, phase.done)
    return Engine(core, info, bound)


def _describe(
    model: LoweredModel, runner: ModelRunner, memory: MemoryPlan, pool: KVPoolSize, phases: Sequence[Phase]
) -> EngineInfo:
    kv, tables = runner.kv, runner.tables
    steps = runner.model.small_steps
    programs = None if steps is None else steps.programs
    why = model.why_uncaptured or (model.waits if memory.plan.execution == "graphs" else "")
    uncaptured = f"a step runs uncaptured (slower): {why}"
    notes = (uncaptured,) if why else () if programs is None else programs.notes()
    return EngineInfo(
        pid=os.getpid(),
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_len=pool.max_len,
        vocab_size=memory.plan.model.vocab_size,
        weights_bytes=model.weights_bytes,
        kv_bytes=kv.num_bytes,
        phases=tuple(phases),
        lowering=(*model.lowering, *describe_drafting(runner)),
        ledger=make_ledger(
            memory,
            pool,
            weights=model.weights_bytes,
            kv=kv.num_bytes,
            tables=tables.nbytes,
            programs=0 if programs is None else programs.num_bytes,
            phases=phases,
        ),
        notes=(*pool.notes, *((model.unread,) if model.unread else ()), *notes),
    )


def load_plan(plan: EnginePlan, bound: BoundEngine, on_progress: OnProgress = lambda _: None) -> LoweredModel:
    """The model of a plan, lowered as the plan says."""

    def loaded(fraction: float, detail: str) -> None:
        if plan.device.kind == "cpu":
            give_back_freed_memory()  # what one layer needed for a moment must not add up over all of them
        on_progress(Progress("load weights", fraction, detail))

    return load_model(
        plan.model,
        recorded(bound.architecture, plan.model),
        bound.quantizer,
        bound.attention_kernel,
        bound.kv_format,
        plan.dtype,
        plan.device.kind,
        loaded,
        kernels=kernels_for(plan.execution, plan.device.kind),
        max_len=plan.max_len,
    )


def _make_runner(
    plan: EnginePlan,
    bound: BoundEngine,
    model: LoweredModel,
    found: CacheGroups,
    groups: Sequence[KVGroup],
    max_len: int,
) -> ModelRunner:
    block_size, device = bound.context.block_size, plan.device.kind
    num_blocks = [group.num_blocks for group in groups]
    kv = KVCache(found, bound.kv_format, num_blocks, block_size, plan.dtype, device)
    for layer, scales in enumerate(model.kv_scales):
        if scales is not None:
            kv.set_scales(layer, *scales)
    rows, drafts, vocab_size = bound.context.max_requests, bound.drafter.max_width, plan.model.vocab_size
    tables = DeviceTables(rows, max_len, drafts, block_size, device, vocab_size, len(groups))
    model = capture_steps(model, kv, tables.tokens.shape[1], aux_layers_of(bound.drafter))
    drafter = on_device(bound.drafter)
    return ModelRunner(model, kv, tables, None if drafter is None else Drafts(drafter, tables))


@torch.inference_mode()
def start_drafter(plan: EnginePlan, bound: BoundEngine, drafter: DeviceDrafter, runner: ModelRunner) -> None:
    """Hand a drafter what it works with. Raises :class:`DoesNotFit` for weights that do not fit it or the target."""
    loading = DraftLoading(
        dtype=plan.dtype,
        max_len=plan.max_len,
        attention=bound.attention_kernel,
        kv_format=bound.kv_format,
        kernels=kernels_for(plan.execution, plan.device.kind),
        describe=partial(recorded, bound.architecture),
        quantizer=partial(_quantizer_for, plan, bound),
    )
    try:
        drafter.start(DraftEngine(runner.model, runner.kv, runner.tables, loading))
    except (ValueError, AssemblyError) as error:
        raise DoesNotFit(f"drafter={plan.choice('drafter').name}: {error}") from error


def _quantizer_for(plan: EnginePlan, bound: BoundEngine, model: ModelFacts) -> Quantizer:
    """The plan's quantizer for another checkpoint."""
    (quantizer,) = build_slots(plan, ("quantizer",), replace(bound.context, model=model))["quantizer"]
    assert isinstance(quantizer, Quantizer)
    return quantizer


def capture_graphs(
    runner: ModelRunner, bound: BoundEngine, capture: Capture, on_progress: OnProgress = lambda progress: None
) -> None:
    """Capture decode steps, and behind them what a drafter on the device does that may be captured. Raises
    :class:`AssemblyError` for a drafter that says so and cannot be."""
    aux_layers, buckets, drafts = aux_layers_of(bound.drafter), graph_buckets(bound), drafts_of(runner)
    drafter = None if drafts is None else drafts.drafter
    graphs = len(buckets) + len(draft_buckets(drafter, buckets))

    def captured(done: int, count: int, fraction: float, what: str) -> None:
        """``fraction`` of the ``count`` graphs that follow ``done`` others."""
        on_progress(Progress("capture graphs", (done + fraction * count) / graphs, what))

    runner.graphs = StepGraphs(runner.model, runner.kv, runner.tables, aux_layers, buckets, capture)
    runner.graphs.capture(partial(captured, 0, len(buckets)))
    if drafts is None or not may_be_captured(drafts.drafter):
        return
    behind = DraftGraphs(drafts.drafter, runner.graphs, capture)
    try:
        behind.capture(partial(captured, len(buckets), graphs - len(buckets)))
    except NotCapturable as error:
        name = bound.plan.choice("drafter").name
        raise AssemblyError([f"drafter={name} {error}; execution=compile captures nothing"]) from error
    drafts.graphs = behind


def drafts_of(runner: ModelRunner) -> Drafts | None:
    """What a drafter on the device does behind a runner's steps."""
    assert runner.drafts is None or isinstance(runner.drafts, Drafts)
    return runner.drafts


def describe_drafting(runner: ModelRunner) -> tuple[str, ...]:
    """How a drafter on the device runs behind captured steps, for the plan."""
    drafts = drafts_of(runner)
    if runner.graphs is None or drafts is None:
        return ()
    if drafts.graphs is None:
        return ("Drafts: eager behind every step: the drafter cannot be captured",)
    return (f"Drafts: captured, {len(drafts.graphs.buckets)} graphs; eager behind prompts",)


def graph_buckets(bound: BoundEngine) -> list[Bucket]:
    """Every decode shape worth a graph."""
    shapes = product(row_buckets(bound.context.max_requests), query_buckets(bound.drafter.max_width))
    return [Bucket(rows, queries) for rows, queries in shapes]


def make_core(
    plan: EnginePlan, bound: BoundEngine, device: DeviceQueue, groups: Sequence[KVGroup], max_len: int
) -> EngineCore:
    """An engine core around a device. ``groups``: as the allocator was started with."""
    scheduler, drafter = config_of(plan.choice("scheduler")), config_of(plan.choice("drafter"))
    assert isinstance(scheduler, SchedulerConfig) and isinstance(drafter, DrafterConfig)
    kv = cached_by(bound.drafter)
    parts = (plan.model.path, *(plan.choice(s).name for s in ("quantizer", "kv_format")), plan.dtype, repr(kv))
    settings = CoreSettings(
        max_len=max_len,
        max_requests=bound.context.max_requests,
        block_size=bound.context.block_size,
        groups=tuple(groups),
        vocab_size=plan.model.vocab_size,
        limits=Limits(scheduler.token_budget, scheduler.itl_target_ms),
        in_flight=plan.in_flight,
        eos_token_ids=plan.model.eos_token_ids,
        key_parts=parts,
        seed=plan.settings.seed,
        max_width=drafter.max_width,
        adaptive_drafts=drafter.adaptive,
        mixtures=mixtures(recorded(bound.architecture, plan.model)),
    )
    return EngineCore(bound, device, settings)
