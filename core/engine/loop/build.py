"""From a plan to a running engine core: bind, load, size the cache, warm up. Every phase is timed and reported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.assembly.bind import BoundEngine, bind, config_of
from engine.assembly.plan import EnginePlan
from engine.contracts.config import DrafterConfig, SchedulerConfig
from engine.contracts.drafter import Drafter
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.model import DeviceFacts
from engine.contracts.request import EngineRequest, SamplingParams
from engine.execution import cpu_ops
from engine.execution.cpu_memory import keep_freed_memory
from engine.execution.kv_cache import KVCache
from engine.execution.loading import load_model
from engine.execution.model import LoweredModel
from engine.execution.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.execution.tables import DeviceTables
from engine.loop.core import EngineCore
from engine.loop.messages import EngineInfo, Phase, Progress
from engine.loop.planning import Limits

OnProgress = Callable[[Progress], None]


class DoesNotFit(RuntimeError):
    """The model or its cache does not fit this device."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that is ready, and what is known about it."""

    core: EngineCore
    info: EngineInfo
    bound: BoundEngine


class _Phases:
    def __init__(self, on_progress: OnProgress) -> None:
        self.done: list[Phase] = []
        self._on_progress = on_progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._on_progress(Progress(name, 0.0))
        started = time.monotonic()
        yield
        self.done.append(Phase(name, round(time.monotonic() - started, 3)))
        self._on_progress(Progress(name, 1.0))


def build_engine(plan: EnginePlan, on_progress: OnProgress = lambda progress: None) -> Engine:
    """Build everything the plan names, in this process. Raises :class:`DoesNotFit` and what plugins raise."""
    torch.set_num_threads(plan.settings.threads or len(os.sched_getaffinity(0)))
    if plan.device.kind == "cpu":
        keep_freed_memory()  # before the device's thread is started
    phase = _Phases(on_progress)
    with phase("bind plugins"):
        bound = bind(plan)
        check_attention(plan, bound)
        check_drafter(plan.choice("drafter").name, bound.drafter)
    if plan.execution == "compile":
        with phase("build kernels"):
            cpu_ops.kernels()
    worker = DeviceWorker(own_thread=plan.overlap)
    with phase("load weights"):
        model = worker.start(partial(load_plan, plan, bound, on_progress))()
    max_requests, block_size = bound.context.max_requests, bound.context.block_size
    with phase("allocate cache"):
        block_bytes = KVCache.block_bytes(plan.model, bound.kv_format, block_size, plan.dtype)
        num_blocks = size_pool(plan, max_requests, block_size, block_bytes)
        max_len = min(plan.max_len, (num_blocks - 1) * block_size)
        layers = tuple(range(plan.model.num_layers))
        bound.kv_allocator.start([KVGroup(0, layers, "full", block_bytes)], num_blocks)
        runner = worker.start(partial(_make_runner, plan, bound, model, num_blocks, max_len))()
    core = make_core(plan, bound, DeviceQueue(runner, worker), max_len)
    with phase("warm up"):
        warm_up(core, max_len)
    info = EngineInfo(
        pid=os.getpid(),
        num_blocks=num_blocks,
        block_size=block_size,
        max_len=max_len,
        vocab_size=plan.model.vocab_size,
        weights_bytes=model.weights_bytes,
        kv_bytes=num_blocks * block_bytes,
        phases=tuple(phase.done),
        lowering=model.lowering,
    )
    return Engine(core, info, bound)


def load_plan(plan: EnginePlan, bound: BoundEngine, on_progress: OnProgress = lambda _: None) -> LoweredModel:
    """The model of a plan, lowered as the plan says."""
    return load_model(
        plan.model,
        bound.architecture.describe(plan.model),
        bound.quantizer,
        bound.attention_kernel,
        bound.kv_format,
        bound.parallelism,
        plan.dtype,
        plan.device.kind,
        lambda fraction, detail: on_progress(Progress("load weights", fraction, detail)),
        execution="compile" if plan.execution == "compile" else "eager",
    )


def _make_runner(
    plan: EnginePlan, bound: BoundEngine, model: LoweredModel, num_blocks: int, max_len: int
) -> ModelRunner:
    block_size, device = bound.context.block_size, plan.device.kind
    kv = KVCache(plan.model, bound.kv_format, num_blocks, block_size, plan.dtype, device)
    tables = DeviceTables(bound.context.max_requests, max_len, bound.drafter.max_width, block_size, device)
    return ModelRunner(model, kv, tables, bound.drafter)


def make_core(plan: EnginePlan, bound: BoundEngine, device: DeviceQueue, max_len: int) -> EngineCore:
    """An engine core around a device."""
    scheduler, drafter = config_of(plan.choice("scheduler")), config_of(plan.choice("drafter"))
    assert isinstance(scheduler, SchedulerConfig) and isinstance(drafter, DrafterConfig)
    kv = bound.drafter.kv
    return EngineCore(
        bound,
        device,
        max_len=max_len,
        max_requests=bound.context.max_requests,
        block_size=bound.context.block_size,
        limits=Limits(scheduler.token_budget, scheduler.itl_target_ms),
        overlap=plan.overlap,
        eos_token_ids=plan.model.eos_token_ids,
        key_parts=(plan.model.path, *(plan.choice(s).name for s in ("quantizer", "kv_format")), plan.dtype, repr(kv)),
        seed=plan.settings.seed,
        vocab_size=plan.model.vocab_size,
        max_width=drafter.max_width,
        adaptive_width=drafter.adaptive,
    )


def check_attention(plan: EnginePlan, bound: BoundEngine) -> None:
    """Raise :class:`DoesNotFit` when the attention kernel cannot compute this model."""
    can, name, model = bound.attention_kernel.capabilities, plan.choice("attention_kernel").name, plan.model
    problems = []
    if can.head_dims is not None and model.head_dim not in can.head_dims:
        problems.append(f"head_dim={model.head_dim}, it has {', '.join(map(str, can.head_dims))}")
    if plan.dtype not in can.dtypes:
        problems.append(f"dtype={plan.dtype}, it has {', '.join(can.dtypes)}")
    if any(model.layer_windows) and not can.window:
        problems.append("sliding-window layers")
    if bound.drafter.max_width > can.max_verify_width:
        problems.append(f"draft width {bound.drafter.max_width}, it verifies {can.max_verify_width}")
    if problems:
        raise DoesNotFit(f"attention_kernel={name} cannot run this model: {'; '.join(problems)}")


def check_drafter(name: str, drafter: Drafter) -> None:
    """Raise :class:`DoesNotFit` when the drafter needs what this version does not provide."""
    if drafter.kv is not None:
        raise DoesNotFit(f"drafter={name} wants a KV cache of its own, which this version does not provide")


def size_pool(plan: EnginePlan, max_requests: int, block_size: int, block_bytes: int) -> int:
    """Blocks of the KV pool, the padding block included: ``memory.kv_tokens``, else what free memory allows, at
    most what ``scheduler.max_requests`` requests of full length can use."""
    memory = plan.settings.memory
    useful = max_requests * -(-plan.max_len // block_size) + 1
    if memory.kv_tokens is not None:
        wanted = -(-memory.kv_tokens // block_size) + 1
    else:
        wanted = useful
    fits = int(free_memory(plan.device) * memory.fraction) // block_bytes
    if memory.kv_tokens is not None and wanted > fits:
        raise DoesNotFit(
            f"memory.kv_tokens={memory.kv_tokens} needs {wanted * block_bytes / 2**30:.2f} GiB, "
            f"{fits * block_bytes / 2**30:.2f} GiB are free within memory.fraction={memory.fraction}: "
            f"set memory.kv_tokens={max(fits - 1, 0) * block_size} or less"
        )
    blocks = min(wanted, fits)
    if blocks < 3:
        raise DoesNotFit(
            f"no room for a KV cache: one block of {block_size} tokens takes {block_bytes / 2**20:.1f} MiB and "
            f"{max(fits, 0)} blocks fit into memory.fraction={memory.fraction} of what is free after the weights"
        )
    return blocks


def free_memory(device: DeviceFacts) -> int:
    """Bytes free on the device now (CPU: available without swapping, and no more than this process may use)."""
    if device.kind == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, device.memory_bytes)
    raise DoesNotFit("/proc/meminfo has no MemAvailable line: set memory.kv_tokens")


def warm_up(core: EngineCore, max_len: int) -> None:
    """Run a few requests of different shapes, so that the first real one meets warm kernels."""
    length = max(min(max_len - 8, 256), 1)
    shapes = [(length, 2), (1, 4), (1, 4)]
    for i, (prompt, wanted) in enumerate(shapes):
        sampling = SamplingParams(max_tokens=min(wanted, max_len - prompt), temperature=0.0, ignore_eos=True)
        core.submit(EngineRequest(f"warm-up-{i}", tuple([0] * prompt), sampling, cache_salt=f"warm-up-{i}"))
    while core.has_work:
        for output in core.step().outputs:
            if output.error:
                raise RuntimeError(f"warm-up failed: {output.error}")
    core.reset_prefix_cache()
