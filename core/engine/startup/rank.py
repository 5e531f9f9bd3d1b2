"""One rank of an engine in the making: bind, load, size the cache, capture. Every phase is timed and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from engine.assembly.bind import BoundEngine, DescribedModel, bind, build_slots, describe_model
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.assembly.threads import cores_of
from engine.contracts.communicator import Communicator
from engine.contracts.drafter import DeviceDrafter, aux_layers_of, cached_by, may_be_captured, on_device
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops.work import Step, Widths
from engine.contracts.quantizer import Quantizer
from engine.drafting.engine import DraftEngine, DraftLoading
from engine.drafting.graphs import DraftGraphs, NotCapturable, draft_buckets
from engine.drafting.runner import Drafts
from engine.kernels.backends import kernels_for
from engine.kernels.cpu.captured import capture_steps
from engine.kernels.cpu.memory import give_back_freed_memory, keep_freed_memory
from engine.kernels.loading import load_model
from engine.kernels.model import LoweredModel
from engine.kv.cache import KVCache
from engine.kv.groups import CacheGroups, cache_groups, of_rank
from engine.loop.messages import Phase, Progress
from engine.models.placement import RankGraph
from engine.models.rotations import rotation_notes
from engine.models.work import work_of
from engine.native import ahead
from engine.ranks.context_parallel import Dealing
from engine.ranks.exchange import Exchange
from engine.ranks.meeting import check_pairs
from engine.ranks.messages import RankInfo
from engine.ranks.steps import RankStatus
from engine.ranks.world import world_of
from engine.sampling.constrained import Constraints, Grammars
from engine.startup.checks import check_attention, check_drafter, try_plugins
from engine.startup.kernels import PHASE, begin_kernels
from engine.startup.memory.budget import DoesNotFit, Meter, free_memory
from engine.startup.memory.fit import plan_memory, size_pool
from engine.startup.memory.profile_run import profile_run
from engine.startup.placing import holding, placed
from engine.startup.stores import check_stores
from engine.startup.warm_up import warm_up_kernels
from engine.step.graphs import Bucket, Capture, StepGraphs, cuda_capture, prompt_buckets, query_buckets, row_buckets
from engine.step.runner import DeviceWorker, ModelRunner
from engine.step.tables import DeviceTables

OnProgress = Callable[[Progress], None]


class Phases:
    """Times the phases of start-up and says which one has begun."""

    def __init__(self, on_progress: OnProgress, meter: Meter) -> None:
        self.done: list[Phase] = []
        self._on_progress = on_progress
        self.meter = meter

    @contextmanager
    def __call__(self, name: str, detail: str = "") -> Iterator[None]:
        self._on_progress(Progress(name, 0.0, detail))
        self.meter.reset_peak()
        started = time.monotonic()
        yield
        seconds, start = round(time.monotonic() - started, 3), self.meter.start
        self.done.append(Phase(name, seconds, self.meter.used() - start, self.meter.peak() - start))
        self._on_progress(Progress(name, 1.0))


class Rank:
    """One rank of an engine in the making. The engine process and workers call the same methods in the same order:
    :meth:`bind`, :meth:`plan_memory`, with several ranks :meth:`meet`, then :meth:`load` and :meth:`allocate`.

    Raises :class:`DoesNotFit`, before any weight is read where that can be known, and what plugins raise.
    """

    def __init__(
        self,
        plan: EnginePlan,
        rank: int = 0,
        on_progress: OnProgress = lambda progress: None,
        free: Callable[[DeviceFacts], int] = free_memory,
        *,
        threads: int | None = None,
        described: DescribedModel | None = None,
    ) -> None:
        """``free`` says how many bytes are free on a device; ``threads``: of torch, otherwise as the plan says;
        ``described``: the plan's model, where it is described already."""
        torch.set_num_threads(threads or cores_of(plan))
        if plan.device.kind == "cpu":
            keep_freed_memory()  # before the device's thread is started
        self.plan = plan
        self.rank = rank
        self._described = described
        self.status = RankStatus()
        self._on_progress = on_progress
        self._device_free = free
        self.phase = Phases(self._progress, Meter(plan.device.kind))
        several = plan.layout.size > 1
        # A GPU works by itself once kernels are launched; a CPU needs a thread that computes. With several ranks the
        # loop watches while this one computes, or waits for others; a worker has nothing else to do.
        own_thread = (plan.overlap and plan.device.kind == "cpu") or several
        self.worker = DeviceWorker(own_thread and rank == 0)

    def _progress(self, progress: Progress) -> None:
        self.status.doing = progress.phase
        self._on_progress(progress)

    def _free(self, device: DeviceFacts) -> int:
        """Bytes free for this rank."""
        planned = self.plan.memory_bytes
        return self._device_free(device) // self.plan.ranks_per_device if planned is None else planned

    @property
    def communicator(self) -> Communicator | None:
        """With several ranks."""
        return self.bound.communicator if self.plan.layout.size > 1 else None

    @property
    def chooses(self) -> bool:
        return self.rank == self.plan.layout.chooser

    def bind(self) -> None:
        """Build the plugins, once what they load is compiled: some of them measure it."""
        described = self._described or describe_model(self.plan)
        compiling = begin_kernels(self.plan, described.graph)
        if compiling:
            with self.phase(PHASE, compiling):
                ahead.finish()
        with self.phase("bind plugins"):
            self.bound = bind(self.plan, described)
            drafter = self.bound.drafter
            drafts_forced = drafter.placement == "host" and drafter.max_width > 0
            self.grammars = Grammars(self.bound.constraint, self.plan.constraint.max_cached, 1 + drafts_forced)
            self.own = placed(self.plan, self.bound)[self.rank]
            check_attention(self.plan, self.bound)
            check_drafter(self.plan, self.bound)
            check_stores(self.plan, self.bound)

    def plan_memory(self) -> None:
        """Refuse what does not fit."""
        with self.phase("plan memory"):
            self.memory = plan_memory(self.plan, self.bound, free=self._free(self.plan.device), own=self.own)

    def meet(self, invitation: str, host: str) -> None:
        """Meet the other ranks: every two that will exchange tensors do it once."""
        plan, communicator = self.plan, self.bound.communicator

        def started() -> None:
            communicator.start(world_of(plan, self.rank, host), invitation)
            self.status.begun = lambda: communicator.begun
            check_pairs(communicator, plan.layout, self.rank, plan.device.kind, self.status)

        with self.phase("meet ranks"):
            self.worker.start(started)()

    def load(self) -> int:
        """Load the weights. Returns how many KV blocks there is memory for."""
        plan, bound = self.plan, self.bound
        with self.phase("try plugins"):
            self.worker.start(partial(try_plugins, plan, bound, self.own.graph))()
        with self.phase("load weights"):
            self.model = self.worker.start(
                partial(load_plan, plan, bound, self._progress, self.own, self.communicator)
            )()
        self._in_graphs = plan.execution == "graphs" and not self.why_not_captured
        if plan.device.kind == "cuda":
            with self.phase("profile run"):
                buckets = graph_buckets(plan, bound, plan.max_len) if self._in_graphs else []
                self.memory = profile_run(
                    self.memory, bound, self.model, buckets, cuda_capture(), self._free, self.phase.meter
                )
        self.own_pool = self.pool = size_pool(self.memory, self.model.weights_bytes, self._free(plan.device))
        return self.pool.blocks

    @property
    def why_not_captured(self) -> str:
        """Why no CUDA graph can hold a step; empty: one can."""
        communicator = self.communicator
        if self.plan.layout.pp > 1:
            return "pipeline stages hand tensors on between layers"
        if communicator is not None and not communicator.capturable:
            return f"communicator={self.plan.choice('communicator').name} cannot be captured"
        return self.model.waits

    def allocate(self, num_blocks: int) -> None:
        """Make cache and tables for so many KV blocks, and all that runs on them."""
        plan, bound = self.plan, self.bound
        with self.phase("allocate cache"):
            self.pool = self.pool.limited(num_blocks, plan.max_len, self.memory.estimate.pool.block_size)
            found = cache_groups(self.bound.graph.caches, cached_by(bound.drafter), plan.layout.dcp)
            self.groups = self.memory.estimate.pool.groups(found, self.pool.blocks)
            found = of_rank(found, self.own)
            make = partial(
                _make_runner, plan, bound, self.model, found, self.groups, self.pool.max_len, self._exchange, self.rank
            )
            self.runner = self.worker.start(make)()
            if self.chooses:
                tables = self.runner.tables
                by_native_code = plan.device.kind == "cpu" and plan.execution == "compile"
                tables.constraints = Constraints(
                    self.grammars,
                    tables.vocab_size,
                    bound.drafter.max_width,
                    by_native_code,
                    plan.constraint.mask_ms / 1e3,
                )
        drafts = drafts_of(self.runner)
        if drafts is not None:
            with self.phase("load drafter"):
                self.worker.start(partial(start_drafter, plan, bound, drafts.drafter, self.runner))()
        if self._in_graphs:
            with self.phase("capture graphs"):
                buckets = graph_buckets(plan, bound, self.pool.max_len)
                capture_graphs(self.runner, bound, buckets, cuda_capture(), self._progress)
        if plan.device.kind == "cuda":
            budget = plan.scheduler.token_budget
            with self.phase("warm up kernels"):
                warm_up_kernels(self.runner, self.pool.max_len, budget)

    @property
    def _exchange(self) -> Exchange | None:
        layout, rank = self.plan.layout, self.rank
        if layout.size == 1:
            return None
        return Exchange(
            self.bound.communicator,
            chooses=self.chooses,
            chooser=layout.chooser,
            tp=layout.tp,
            num_ranks=layout.stage_size,
            before=layout.before(rank),
            after=layout.after(rank),
            aux_layers=tuple(aux_layers_of(self.bound.drafter)),
            first_layer=self.own.stage.first,
            last_layer=self.own.stage.last,
        )

    def info(self, place: str) -> RankInfo:
        """``place``: where it runs."""
        kv = self.runner.kv.num_bytes
        return RankInfo(
            self.rank,
            place,
            holding(self.own, self.plan.layout, self.rank),
            self.model.weights_bytes,
            kv,
            self.own_pool.blocks,
        )

    def notes(self) -> tuple[str, ...]:
        """What the user should know about this rank."""
        of_rotations = rotation_notes(self.bound.graph, self.plan.max_len)
        return (*self.pool.notes, *self.model.notes, *of_rotations, *_program_notes(self))


def _program_notes(rank: Rank) -> tuple[str, ...]:
    model, steps = rank.model, rank.runner.model.small_steps
    why = model.why_uncaptured or (rank.why_not_captured if rank.plan.execution == "graphs" else "")
    if why:
        return (f"a step runs uncaptured (slower): {why}",)
    return () if steps is None else steps.programs.notes()


def load_plan(
    plan: EnginePlan,
    bound: BoundEngine,
    on_progress: OnProgress = lambda _: None,
    own: RankGraph | None = None,
    collectives: Communicator | None = None,
) -> LoweredModel:
    """The model of a plan, lowered as the plan says; or with several ranks the one's ``own`` share of it."""

    def loaded(fraction: float, detail: str) -> None:
        if plan.device.kind == "cpu":
            give_back_freed_memory()  # what one layer needed for a moment must not add up over all of them
        on_progress(Progress("load weights", fraction, detail))

    return load_model(
        plan.model,
        bound.graph,
        bound.quantizer,
        bound.attention_kernel,
        bound.kv_format,
        plan.dtype,
        plan.device.kind,
        loaded,
        kernels=kernels_for(plan.execution, plan.device.kind),
        max_len=plan.max_len,
        own=None if own is None else own.graph,
        collectives=collectives,
    )


def _make_runner(
    plan: EnginePlan,
    bound: BoundEngine,
    model: LoweredModel,
    found: CacheGroups,
    groups: Sequence[KVGroup],
    max_len: int,
    exchange: Exchange | None = None,
    rank: int = 0,
) -> ModelRunner:
    block_size, device = bound.context.block_size, plan.device.kind
    num_blocks = [group.num_blocks for group in groups]
    kv = KVCache(found, bound.kv_format, num_blocks, block_size, plan.dtype, device)
    for layer, scales in enumerate(model.kv_scales):
        if scales is not None:
            kv.set_scales(layer, *scales)
    rows, drafts, vocab_size = bound.context.max_requests, bound.drafter.max_width, plan.model.vocab_size
    tables = DeviceTables(rows, max_len, drafts, block_size, device, vocab_size, len(groups), found.token_shares)
    aux_layers = aux_layers_of(bound.drafter) if exchange is None else exchange.own_aux_layers
    model = capture_steps(model, kv, tables.tokens.shape[1], aux_layers)
    drafter = on_device(bound.drafter) if exchange is None or exchange.samples else None
    dealing = None
    if exchange is not None:
        tables.agreed = exchange.agreed
        if plan.layout.pcp > 1:
            fewest = plan.parallelism.pcp_min_tokens
            dealing = Dealing(plan.layout.pcp, plan.layout.part(rank), fewest, tables, exchange.communicator)
    return ModelRunner(model, kv, tables, None if drafter is None else Drafts(drafter, tables), exchange, dealing)


@torch.inference_mode()
def start_drafter(plan: EnginePlan, bound: BoundEngine, drafter: DeviceDrafter, runner: ModelRunner) -> None:
    """Hand a drafter what it works with. Raises :class:`DoesNotFit` for weights that do not fit it or the target."""
    loading = DraftLoading(
        dtype=plan.dtype,
        max_len=plan.max_len,
        attention=bound.attention_kernel,
        kv_format=bound.kv_format,
        kernels=kernels_for(plan.execution, plan.device.kind),
        describe=bound.context.describe,
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
    runner: ModelRunner,
    bound: BoundEngine,
    buckets: Sequence[Bucket],
    capture: Capture,
    on_progress: OnProgress = lambda progress: None,
) -> None:
    """Capture steps, and after them what a drafter on the device does that may be captured. Raises
    :class:`AssemblyError` for a drafter that says so and cannot be."""
    aux_layers, drafts = aux_layers_of(bound.drafter), drafts_of(runner)
    drafter = None if drafts is None else drafts.drafter
    graphs = len(buckets) + len(draft_buckets(drafter, buckets))

    def captured(done: int, count: int, fraction: float, what: str) -> None:
        """``fraction`` of the ``count`` graphs that follow ``done`` others."""
        on_progress(Progress("capture graphs", (done + fraction * count) / graphs, what))

    runner.graphs = StepGraphs(runner.model, runner.kv, runner.tables, aux_layers, buckets, capture)
    runner.graphs.capture(partial(captured, 0, len(buckets)))
    if drafts is None or not may_be_captured(drafts.drafter):
        return
    after = DraftGraphs(drafts.drafter, runner.graphs, capture)
    try:
        after.capture(partial(captured, len(buckets), graphs - len(buckets)))
    except NotCapturable as error:
        name = bound.plan.choice("drafter").name
        raise AssemblyError([f"drafter={name} {error}; execution=compile captures nothing"]) from error
    drafts.graphs = after


def drafts_of(runner: ModelRunner) -> Drafts | None:
    """What a drafter on the device does after a runner's steps."""
    assert runner.drafts is None or isinstance(runner.drafts, Drafts)
    return runner.drafts


def describe_drafting(runner: ModelRunner) -> tuple[str, ...]:
    """How a drafter on the device runs after captured steps, for the plan."""
    drafts = drafts_of(runner)
    if runner.graphs is None or drafts is None:
        return ()
    if drafts.graphs is None:
        return ("Drafts: eager after every step: the drafter cannot be captured",)
    return (f"Drafts: captured, {len(drafts.graphs.buckets)} graphs; eager after prompts that are long or not alone",)


def graph_buckets(plan: EnginePlan, bound: BoundEngine, max_len: int) -> list[Bucket]:
    """Every shape worth a graph, on all ranks alike: of decode steps, and of prompts where ranks do not share out their
    tokens. ``max_len``: of a text for which tables and pool have room."""
    first = placed(plan, bound)[0]

    def layer_flops(tokens: int) -> float:
        work = work_of(first, Step(1, tokens), Widths(), plan.layout.ep)
        return work.flops / work.num_layers

    shapes = product(row_buckets(bound.context.max_requests), query_buckets(bound.drafter.max_width))
    most = min(max_len, plan.scheduler.token_budget) if plan.layout.pcp == 1 else 0
    prompts = prompt_buckets(layer_flops, most, plan.device.capability)
    return [*(Bucket(rows, queries) for rows, queries in shapes), *prompts]
