"""What the largest step and its capture really take on a GPU, measured before the KV pool takes the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.drafter import aux_layers_of, cached_by, on_device
from engine.contracts.model import DeviceFacts
from engine.contracts.request import SamplingParams
from engine.drafting.graphs import draft_buckets
from engine.kernels.model import LoweredModel
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.sampling.state import Feature
from engine.sampling.verify import choose_tokens
from engine.startup.memory.budget import DoesNotFit, Meter
from engine.startup.memory.estimate import MemoryPlan
from engine.startup.memory.report import size
from engine.step.graphs import Bucket, Capture, StepGraphs
from engine.step.plan import StepRow
from engine.step.tables import DeviceTables

FULL_SAMPLING = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
"""All filters, on every row that can be sampled."""


@torch.inference_mode()
def profile_run(
    memory: MemoryPlan,
    bound: BoundEngine,
    model: LoweredModel,
    buckets: Sequence[Bucket],
    capture: Capture,
    free: Callable[[DeviceFacts], int],
    meter: Meter,
) -> MemoryPlan:
    """``memory`` after loading, with a measured workspace and measured graphs (``buckets`` empty: none).

    Runs a step of ``scheduler.token_budget`` tokens and captures the two largest buckets and the two with the most
    logits, on a pool of two blocks whose first, the padding block, stands in for all. The last capture, the second of
    its kind, says what each further one adds, those of a drafter among them, which is not loaded yet. Raises
    :class:`DoesNotFit` when the device's memory runs out.
    """
    plan = memory.plan
    block_size, device = bound.context.block_size, plan.device.kind
    groups = cache_groups(model.graph.caches, cached_by(bound.drafter))
    kv = KVCache(groups, bound.kv_format, [2] * groups.num_groups, block_size, plan.dtype, device)
    vocab_size = plan.model.vocab_size
    requests, drafts = bound.context.max_requests, bound.drafter.max_width
    shares = groups.token_shares
    tables = DeviceTables(requests, plan.max_len, drafts, block_size, device, vocab_size, len(shares), shares)
    try:
        give_back()
        meter.reset_peak()
        before = meter.used()
        _largest_step(plan, bound, model, kv, tables)
        workspace = meter.peak() - before
        give_back()
        largest_first = sorted(buckets, key=lambda bucket: (-bucket.tokens, -bucket.rows))
        most_logits = sorted(buckets, key=lambda bucket: -bucket.num_choices)
        measured = {*largest_first[:2], *most_logits[:2]}
        captured = StepGraphs(model, kv, tables, aux_layers_of(bound.drafter), measured, capture)
        readings: list[int] = []
        captured.capture(lambda fraction, what: readings.append(free(plan.device)))
        readings.append(free(plan.device))
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"the largest step does not fit beside the weights ({size(model.weights_bytes)}): {error}. Set a smaller "
            "scheduler.token_budget or scheduler.max_requests"
        ) from error
    taken = [max(0, before - after) for before, after in pairwise(readings)]
    further = len(buckets) - len(taken) + len(draft_buckets(on_device(bound.drafter), buckets))
    graphs = sum(taken) + (taken[-1] * further if taken else 0)
    # Some steps take memory in ways that this one does not: prompt logprobs, for one. The estimate knows of them.
    workspace = max(workspace, memory.estimate.workspace)
    del captured, kv, tables
    give_back()
    return replace(memory, estimate=replace(memory.estimate, workspace=workspace, graphs=graphs, loading=0))


def give_back() -> None:
    """Return what torch keeps for later to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _largest_step(plan: EnginePlan, bound: BoundEngine, model: LoweredModel, kv: KVCache, tables: DeviceTables) -> None:
    budget = plan.scheduler.token_budget
    most = bound.context.max_requests
    lengths = [min(plan.max_len, budget - start) for start in range(0, budget, plan.max_len)][:most]
    rows = tuple(StepRow(tables.nobody, 0, length) for length in lengths)
    inputs = tables.inputs(rows)
    hidden, _ = model.forward(inputs.forward, kv, aux_layers_of(bound.drafter))
    sampled = hidden[: most * (1 + bound.drafter.max_width)]
    tables.sampling.write(tables.nobody, FULL_SAMPLING, 0, 1, ())
    nobody = torch.full((len(sampled),), tables.nobody, device=tables.device)
    batch = tables.sampling.at(nobody, torch.zeros_like(nobody), Feature.SAMPLED | Feature.FILTERED)
    choose_tokens(model.head(sampled), batch, tables.sampling, tables.tokens, 1, model.on_triton)
