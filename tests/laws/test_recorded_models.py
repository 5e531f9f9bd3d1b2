"""A real model on the Triton kernels, its decode steps recorded: the tokens are those of plain torch, one by one.

Runs under Triton's interpreter, in a process of its own. The cache starts as NaN: whatever reads a key or value that
nobody wrote shows up in the tokens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.config import ParallelismConfig, SlotConfig
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.request import EngineRequest, SamplingParams
from engine.execution.graphs import Bucket, StepGraphs
from engine.execution.kv_cache import KVCache
from engine.execution.loading import load_model
from engine.execution.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.execution.tables import DeviceTables
from engine.execution.triton_ops.device import runs_triton
from engine.loop.build import make_core
from engine_plugins.kv_format.native import NativeFormat
from engine_plugins.parallelism.single import SingleDevice

from ..execution import tiny
from ..execution.paged_loop import PagedLoop, load
from .harness import run, run_again

INTERPRETED = runs_triton("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, with TRITON_INTERPRET=1")
REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = 8
REQUESTS = [
    EngineRequest("short", (5, 6), SamplingParams(max_tokens=7, temperature=0.0)),
    EngineRequest("long", tuple(range(3, 40)), SamplingParams(max_tokens=4, temperature=0.0)),
    EngineRequest("echo", (9, 8, 7, 9, 8, 7, 9, 8), SamplingParams(max_tokens=6, temperature=0.0)),
    EngineRequest("late", tuple(range(90, 70, -1)), SamplingParams(max_tokens=3, temperature=0.0)),
]


@pytest.mark.skipif(INTERPRETED, reason="the tests below run in this very process")
def test_recorded_steps_on_the_triton_kernels_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", __file__]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 3, done.stdout


@interpreted
@pytest.mark.parametrize(("overlap", "drafter"), [("true", "none"), ("false", "none"), ("true", "ngram")])
def test_the_tokens_are_those_of_plain_torch(tmp_path: Path, overlap: str, drafter: str) -> None:
    from engine_plugins.attention_kernel.triton.kernel import TritonAttention

    checkpoint = tiny.write(tmp_path)
    plan = assemble(
        [
            f"model.path={checkpoint}",
            "device=cpu",
            "attention_kernel=torch",
            f"drafter={drafter}",
            f"overlap={overlap}",
            "exporter=[]",
            f"kv_allocator.block_size={BLOCK}",
            "kv_allocator=prefix_cache",
            "scheduler.max_requests=3",
            "scheduler.token_budget=20",
            "model.max_len=96",
            "model.dtype=float32",
        ]
    )
    bound = bind(plan)
    context, num_blocks = bound.context, 40
    kv_format = NativeFormat(SlotConfig(), context)
    model = load_model(
        plan.model,
        bound.architecture.describe(plan.model),
        bound.quantizer,
        TritonAttention(SlotConfig(), context, num_sms=4),
        kv_format,
        SingleDevice(ParallelismConfig(), context),
        "float32",
        "cpu",
        kernels="triton",
    )
    kv = KVCache(plan.model, kv_format, num_blocks, BLOCK, "float32", "cpu")
    for layer in range(plan.model.num_layers):
        for tensor in kv.layer(layer)[:2]:
            assert tensor is not None
            tensor.fill_(float("nan"))
    tables = DeviceTables(context.max_requests, plan.max_len, bound.drafter.max_width, BLOCK, "cpu")
    buckets = [Bucket(rows, queries) for rows in (1, 3) for queries in {1, bound.drafter.max_width + 1}]
    graphs = StepGraphs(model, kv, tables, bound.drafter.taps, buckets, run_again)
    graphs.capture()
    runner = ModelRunner(model, kv, tables, bound.drafter, graphs)
    bound.kv_allocator.start([KVGroup(0, tuple(range(plan.model.num_layers)), "full", 1)], num_blocks)
    core = make_core(replace(plan), bound, DeviceQueue(runner, DeviceWorker(plan.overlap)), plan.max_len)
    outputs = run(core, REQUESTS)
    core.close()

    torch.manual_seed(0)
    facts, plain = load(checkpoint, kernels="reference")
    loop = PagedLoop(facts, plain)
    want = {r.request_id: loop.greedy(r.prompt, r.sampling.max_tokens) for r in REQUESTS}
    assert outputs == want
