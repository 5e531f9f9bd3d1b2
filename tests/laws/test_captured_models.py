"""A real model on the Triton kernels, its steps captured: the tokens are those of plain torch, one by one.

Runs in Triton's interpreter (see ``tests/interpreted.py``). The cache starts as NaN: whatever reads a key or value that
nobody wrote shows up in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from engine.assembly.assemble import assemble
from engine.assembly.bind import BoundEngine, bind
from engine.assembly.plan import EnginePlan
from engine.contracts.config import SlotConfig
from engine.contracts.drafter import aux_layers_of
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.request import EngineRequest, SamplingParams
from engine.kernels.context import StepContext, prepared_of
from engine.kernels.loading import load_model
from engine.kernels.model import LoweredModel
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.models.record import recorded
from engine.startup.build import make_core
from engine.step.graphs import Bucket, CapturedStep, StepGraphs
from engine.step.plan import StepRow
from engine.step.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.step.tables import DeviceTables
from tests.launches import Launches, count_launches

from ..kernels import tiny
from ..kernels.paged_loop import PagedLoop, load
from .harness import run, run_again

BLOCK, NUM_BLOCKS = 8, 40
REQUESTS = [
    EngineRequest("short", (5, 6), SamplingParams(max_tokens=5, temperature=0.0)),
    EngineRequest("long", tuple(range(3, 27)), SamplingParams(max_tokens=2, temperature=0.0)),
    EngineRequest("echo", (9, 8, 7, 9, 8, 7, 9, 8), SamplingParams(max_tokens=5, temperature=0.0)),
    EngineRequest("late", tuple(range(90, 80, -1)), SamplingParams(max_tokens=2, temperature=0.0)),
]
ALONE = [structs.replace(each, request_id=f"{each.request_id} alone", prompt=each.prompt[1:]) for each in REQUESTS]


def triton_model(checkpoint: Path, *overrides: str) -> tuple[EnginePlan, BoundEngine, LoweredModel, KVCache]:
    """A checkpoint lowered to Triton, as it would be on a GPU, and a cache that holds nothing but NaN."""
    from engine_plugins.attention_kernel.triton.kernel import TritonAttention

    fixed = ("device=cpu", "attention_kernel=torch", "exporter=[]", "model.max_len=96", "model.dtype=float32")
    sizes = (f"kv_allocator.block_size={BLOCK}", "scheduler.max_requests=3", "scheduler.token_budget=20")
    plan = assemble([f"model.path={checkpoint}", *fixed, *sizes, *overrides])
    bound = bind(plan)
    model = load_model(
        plan.model,
        recorded(bound.architecture, plan.model),
        bound.quantizer,
        TritonAttention(SlotConfig(), bound.context, num_sms=4),
        bound.kv_format,
        "float32",
        "cpu",
        kernels="triton",
    )
    kv = KVCache(cache_groups(model.graph.caches), bound.kv_format, [NUM_BLOCKS], BLOCK, "float32", "cpu")
    for layer in kv.layers.values():
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    return plan, bound, model, kv


@pytest.mark.parametrize(
    ("overlap", "drafter"),
    [("true", "ngram"), *(pytest.param(overlap, "none", marks=pytest.mark.slow) for overlap in ("true", "false"))],
)
def test_the_tokens_are_those_of_plain_torch(tmp_path: Path, overlap: str, drafter: str) -> None:
    checkpoint = tiny.write(tmp_path, layers=1)
    drafts = ("drafter.max_width=2",) if drafter == "ngram" else ()
    options = (*drafts, f"drafter={drafter}", f"overlap={overlap}", "kv_allocator=prefix_cache")
    plan, bound, model, kv = triton_model(checkpoint, *options)
    requests, widest, vocab = bound.context.max_requests, bound.drafter.max_width, plan.model.vocab_size
    tables = DeviceTables(requests, plan.max_len, widest, BLOCK, "cpu", vocab)
    buckets = [Bucket(rows, queries) for rows in (1, 3) for queries in {1, widest + 1}] + [Bucket(1, 16, prompt=True)]
    replayed: list[Bucket] = []

    class Watched(StepGraphs):
        def replay(self, bucket: Bucket, rows: Sequence[StepRow]) -> tuple[CapturedStep, Mapping[int, str]]:
            replayed.append(bucket)
            return super().replay(bucket, rows)

    graphs = Watched(model, kv, tables, aux_layers_of(bound.drafter), buckets, run_again)
    graphs.capture()
    runner = ModelRunner(model, kv, tables)
    runner.graphs = graphs
    groups = [KVGroup(0, tuple(range(plan.model.num_layers)), "full", 1, NUM_BLOCKS)]
    bound.kv_allocator.start(groups)
    core = make_core(plan, bound, DeviceQueue(runner, DeviceWorker(plan.overlap)), groups, plan.max_len)
    outputs = run(core, REQUESTS)
    decoded = len(replayed)
    alone = [run(core, [request])[request.request_id] for request in ALONE]
    core.close()

    facts, plain = load(checkpoint, kernels="reference")
    loop = PagedLoop(facts, plain)
    want = {r.request_id: loop.greedy(r.prompt, r.sampling.max_tokens) for r in REQUESTS}
    assert outputs == want
    assert alone == [loop.greedy(r.prompt, r.sampling.max_tokens) for r in ALONE]
    assert decoded >= 2 and Bucket(1, 16, prompt=True) in replayed


@pytest.mark.parametrize(
    ("family", "count", "rows"), [("Llama", 5, 1), ("Llama", 5, 16), ("Qwen2", 5, 4), ("Qwen3", 6, 1), ("Qwen3", 6, 16)]
)
def test_a_layer_is_five_or_six_launches_attention_included(tmp_path: Path, family: str, count: int, rows: int) -> None:
    plan, _, model, kv = triton_model(tiny.variant(tmp_path, f"{family}ForCausalLM", tied=False, stored=torch.float32))
    tables = DeviceTables(rows, plan.max_len, 0, BLOCK, "cpu", plan.model.vocab_size)
    tables.tokens[:] = 0
    tables.computed[:] = 8
    batch = tables.inputs(tuple(StepRow(row_id, 8, 1) for row_id in range(rows))).forward
    prepared = prepared_of(model.attention, batch.attention)
    context = StepContext(
        model.rotate(batch.positions), batch.slot_mappings, prepared, kv, batch.positions, batch.attention
    )
    with torch.inference_mode():
        # The first layer of its kind in a step plans the launches of attention.
        model.layers[0].run({model.layers[0].residual: model.embed(batch.token_ids)}, context)
        values = {model.layers[0].residual: model.embed(batch.token_ids)}
        with count_launches() as launches:
            model.layers[0].run(values, context)
    assert len(launches.names) == count and launches.torch_ops == [], launches.names


def test_a_captured_step_launches_little_beside_its_layers(tmp_path: Path) -> None:
    """One kernel fills it and one settles it; what samples is captured after it, without and with penalties."""
    plan, _, model, kv = triton_model(tiny.write(tmp_path, layers=1))
    tables = DeviceTables(3, plan.max_len, 0, BLOCK, "cpu", plan.model.vocab_size)
    captured: list[Launches] = []

    def counted(step: Callable[[], None]) -> Callable[[], None]:
        step()  # the first, largest step makes memory
        with count_launches() as launches:
            step()
        captured.append(launches)
        return step

    StepGraphs(model, kv, tables, (), [Bucket(3, 1)], counted).capture()
    step, sample, adjust, logprobs = captured
    assert step.kernels[0] == "step_inputs" and step.kernels[-1] == "step_outputs"
    assert sample.kernels == sample.names == ["gather_columns", "survey", "find_border", "draw", "step_outputs"]
    assert adjust.kernels == ["gather_columns", "apply_penalties", *sample.kernels[1:]]
    assert len(step.names) == 6 + 5 and (len(adjust.names), len(logprobs.names)) == (24, 4)
