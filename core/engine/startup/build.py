"""From a plan to a running engine core: build rank 0, start the others, warm up."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.assembly.bind import BoundEngine, DescribedModel
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import check_finite, open_checkpoint
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.model import DeviceFacts
from engine.loop.core import CoreSettings, Device, EngineCore
from engine.loop.forcing import MatcherOf
from engine.loop.messages import EngineInfo, Progress
from engine.loop.planning import Limits
from engine.models.footprint import mixtures
from engine.models.manifest import unread_names
from engine.ranks.messages import RankInfo
from engine.ranks.steps import RankedDevice, RankSteps
from engine.sampling.constrained import Grammars
from engine.startup.calibration import calibration
from engine.startup.checks import check_pool
from engine.startup.content_digest import FileState
from engine.startup.further_ranks import Ranks
from engine.startup.memory.budget import free_memory
from engine.startup.memory.ledger import make_ledger
from engine.startup.namespace import identity_of, passing_namespace
from engine.startup.rank import Rank, describe_drafting
from engine.startup.segments import Segments
from engine.startup.stores import files_to_read, namespace_of, open_stores
from engine.startup.warm_up import warm_up, warm_up_sampling
from engine.step.plan import StepResult
from engine.step.runner import DeviceQueue

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that is ready, and what is known about it."""

    core: EngineCore
    info: EngineInfo
    bound: BoundEngine
    expert_load: Callable[[], Mapping[int, tuple[int, ...]]]
    """As :meth:`engine.kernels.model.LoweredModel.expert_load`, of rank 0."""
    grammars: Grammars
    """Compiled ones, of rank 0."""


def build_engine(
    plan: EnginePlan,
    on_progress: OnProgress = lambda progress: None,
    free: Callable[[DeviceFacts], int] = free_memory,
    on_failure: Callable[[str], None] = lambda why: None,
    described: DescribedModel | None = None,
    segments: Segments | None = None,
) -> Engine:
    """Build everything the plan names: rank 0 in this process, further ranks where its launcher starts them.

    ``free`` says how many bytes are free on a device; ``on_failure`` is called, by a thread of its own, if a rank fails
    later on; ``described``: the plan's model, where it is described already; ``segments``: memory that outlives the
    engine. Raises :class:`~engine.startup.memory.budget.DoesNotFit`, before any weight is read where that can be known,
    and what plugins raise.
    """
    rank = Rank(plan, 0, on_progress, free, described=described)
    rank.bind()
    files = files_to_read(plan, rank.bound)
    if plan.layout.size > 1:
        return _build_ranks(rank, files, on_progress, on_failure, segments)
    rank.plan_memory()
    rank.allocate(rank.load())
    return _finish(rank, files, DeviceQueue(rank.runner, rank.worker), segments)


def _build_ranks(
    rank: Rank,
    files: Sequence[FileState],
    on_progress: OnProgress,
    on_failure: Callable[[str], None],
    segments: Segments | None,
) -> Engine:
    rank.plan_memory()
    with rank.phase("start ranks"):
        ranks = Ranks(rank.plan, rank.bound, rank.status.where, on_progress, on_failure)
    try:
        ranks.together(partial(rank.meet, ranks.invitation, ranks.host))
        num_blocks, binding = ranks.fewest_blocks(ranks.together(rank.load))
        ranks.together(partial(rank.allocate, num_blocks))
        infos, notes = ranks.built()
        rank.status.doing = ""
        workers = ranks.workers
        done = workers.deliver if rank.chooses else _told_elsewhere
        steps = RankSteps(rank.runner, rank.worker, rank.status, done, workers.local_failed)
        device = RankedDevice(steps, workers, rank.bound.parallelism, rank.bound.communicator)
        infos = (rank.info(f"pid {os.getpid()}"), *infos)
        notes += _binding_note(infos, binding)
        return _finish(rank, files, device, segments, infos, notes)
    except BaseException as error:
        ranks.close(error)
        raise


def _told_elsewhere(result: StepResult) -> None:
    """Another rank chooses tokens, and sends its result."""


def _binding_note(infos: Sequence[RankInfo], binding: int) -> tuple[str, ...]:
    """Where ranks have memory for different numbers of blocks."""
    counts = [info.num_blocks for info in infos]
    if min(counts) == max(counts):
        return ()
    most = counts.index(max(counts))
    return (
        f"rank {binding} has memory for {counts[binding]} KV blocks, the fewest, so all ranks have as many; rank "
        f"{most} has memory for {counts[most]}",
    )


def _finish(
    rank: Rank,
    files: Sequence[FileState],
    device: DeviceQueue | RankedDevice,
    segments: Segments | None,
    ranks: tuple[RankInfo, ...] = (),
    notes: tuple[str, ...] = (),
) -> Engine:
    """The core around a device, once requests of its own have gone through all ranks. ``files``: their state before
    weights were read from them."""
    plan, bound = rank.plan, rank.bound
    bound.kv_allocator.start(rank.groups)
    check_pool(bound.kv_allocator, rank.groups)
    namespace = namespace_of(plan, bound, files)
    core = make_core(plan, bound, device, rank.groups, rank.pool.max_len, rank.grammars.matcher_of, namespace)
    with rank.phase("warm up"):
        try:
            if plan.device.kind == "cuda":
                warm_up_sampling(core, rank.pool.max_len, plan.scheduler.token_budget)
            warm_up(core, rank.pool.max_len)
        except AssemblyError:
            checkpoint = open_checkpoint(plan.model.path)
            check_finite(checkpoint, checkpoint.names - unread_names(bound.graph, checkpoint.names))
            raise
        core.check_idle()
    if bound.kv_stores:
        with rank.phase("open KV stores"):
            open_stores(plan, bound, rank.runner, device, core, segments)
    rank.model.forget_expert_load()
    rank.status.doing = ""
    info = _describe(rank, ranks, notes, namespace, identity_of(plan, namespace, files))
    return Engine(core, info, bound, rank.model.expert_load, rank.grammars)


def _describe(
    rank: Rank, ranks: tuple[RankInfo, ...], notes: tuple[str, ...], namespace: str, identity: str
) -> EngineInfo:
    model, runner, memory, pool = rank.model, rank.runner, rank.memory, rank.pool
    kv, steps, phases = runner.kv, runner.model.small_steps, rank.phase.done
    return EngineInfo(
        pid=os.getpid(),
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        kv_tokens=(pool.blocks - 1) * kv.block_size,
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
            tables=runner.tables.nbytes,
            programs=0 if steps is None else steps.programs.num_bytes,
            phases=phases,
        ),
        notes=(*rank.notes(), *notes),
        ranks=ranks,
        namespace=namespace,
        identity=identity,
    )


def make_core(
    plan: EnginePlan,
    bound: BoundEngine,
    device: Device,
    groups: Sequence[KVGroup],
    max_len: int,
    matcher_of: MatcherOf | None = None,
    namespace: str = "",
) -> EngineCore:
    """An engine core around a device. ``groups``: as the allocator was started with; ``matcher_of``: see
    :class:`EngineCore`; ``namespace``: of block keys, where they outlive this process."""
    scheduler, drafter = plan.scheduler, plan.drafter
    of_model = mixtures(bound.graph)
    settings = CoreSettings(
        max_len=max_len,
        max_requests=bound.context.max_requests,
        block_size=bound.context.block_size,
        groups=tuple(groups),
        vocab_size=plan.model.vocab_size,
        limits=Limits(
            scheduler.token_budget,
            scheduler.itl_target_ms,
            plan.in_flight if plan.layout.pp > 1 else 1,
            plan.settings.slo.late_s,
        ),
        in_flight=plan.in_flight,
        eos_token_ids=plan.model.eos_token_ids,
        namespace=namespace or passing_namespace(plan),
        seed=plan.settings.seed,
        max_width=drafter.max_width,
        adaptive_drafts=drafter.adaptive,
        mixtures=of_model,
        calibration=calibration(plan, of_model),
    )
    return EngineCore(bound, device, settings, matcher_of=matcher_of)
