"""An engine whose decode steps, short prompts and drafts are captured on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.drafter import on_device
from engine.drafting import graphs as draft_graphs
from engine.drafting.runner import Drafts
from engine.kernels.loading import load_model
from engine.kernels.settings import Kernels
from engine.kv.cache import KVCache
from engine.kv.groups import PoolShape, cache_groups
from engine.loop.core import EngineCore
from engine.models.record import recorded
from engine.startup import rank
from engine.startup.build import make_core
from engine.startup.rank import capture_graphs, start_drafter
from engine.step.graphs import Bucket, Capture, query_buckets
from engine.step.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.step.tables import DeviceTables

from .dense_attention import DenseAttention
from .frozen import FrozenGraphs

BLOCK = 8


@dataclass(slots=True)
class Capturing:
    """An engine whose steps and drafts are captured."""

    core: EngineCore
    runner: ModelRunner
    capture: Capture


def capturing_engine(
    *overrides: str,
    row_shapes: Sequence[int] = (1, 2, 4),
    query_shapes: Sequence[int] | None = None,
    prompts: Sequence[int] = (8, 16),
    blocks: int = 200,
    drafter: Any = None,
    kernels: Kernels = "torch",
    attention: Any = None,
    capture: Capture | None = None,
) -> Capturing:
    """Its cache begins as NaN: whatever reads a key that nobody wrote shows up.

    ``row_shapes``, ``query_shapes`` (``None``: as in an engine), ``prompts``: the captured shapes; without rows none
    are. ``drafter``: instead of the plan's; ``kernels``, ``attention`` (made of a build context) and ``capture``:
    instead of plain torch, :class:`DenseAttention` and :class:`FrozenGraphs`."""
    common = ("device=cpu", "threads=1", "model.dtype=float32", "model.max_len=128", "exporter=[]", "execution=eager")
    plan = assemble([*common, "attention_kernel=torch", f"kv_allocator.block_size={BLOCK}", *overrides])
    bound = bind(plan)
    bound = replace(bound, attention_kernel=DenseAttention() if attention is None else attention(bound.context))
    bound = bound if drafter is None else replace(bound, drafter=drafter)
    model = load_model(
        plan.model, recorded(bound.architecture, plan.model), bound.quantizer, bound.attention_kernel, bound.kv_format,
        plan.dtype, "cpu", kernels=kernels,
    )  # fmt: skip
    drafter, drafts, capture = on_device(bound.drafter), bound.drafter.max_width, capture or FrozenGraphs()
    found = cache_groups(model.graph.caches, None if drafter is None else drafter.kv)
    kv = KVCache(found, bound.kv_format, [blocks] * found.num_groups, BLOCK, plan.dtype, "cpu")
    of_layers = (tensor for layer in kv.layers.values() for tensor in (layer.k, layer.v))
    of_states = (tensor for state in kv.states.values() for tensor in (state.tokens, state.states))
    for tensor in (*of_layers, *of_states):
        tensor.fill_(float("nan"))
    rows, vocab_size = bound.context.max_requests, plan.model.vocab_size
    tables = DeviceTables(rows, plan.max_len, drafts, BLOCK, "cpu", vocab_size, found.num_groups)
    sizes = (1,) * found.num_groups
    shape = PoolShape(found.reaches, sizes, BLOCK, plan.max_len, 64, rows, found.full_share)
    groups = [replace(group, num_blocks=blocks) for group in shape.groups(found, blocks)]
    bound.kv_allocator.start(groups)
    runner = ModelRunner(model, kv, tables, None if drafter is None else Drafts(drafter, tables))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "kernels_for", lambda execution, device: kernels)
        if query_shapes:
            patch.setattr(draft_graphs, "query_buckets", lambda widest: query_shapes)
        if drafter is not None:
            start_drafter(plan, bound, drafter, runner)
        shapes = product(row_shapes, query_shapes or query_buckets(drafts))
        decode = [Bucket(rows, queries) for rows, queries in shapes]
        capture_graphs(runner, bound, [*decode, *(Bucket(1, n, prompt=True) for n in prompts if row_shapes)], capture)
    core = make_core(plan, bound, DeviceQueue(runner, DeviceWorker(False)), groups, plan.max_len)
    return Capturing(core, runner, capture)
