"""Single-stream decode and prefill of a model on this CPU, as shares of what the machine can do in the same run.

    python tools/make_random_model.py /path/to/model
    python tools/benchmarks/cpu_decode.py /path/to/model [--set execution=eager --set quantizer=int8] [--threads 2]

Decode is bound by reading the weights once per token: its share is (weight + KV bytes read for a token) / time over the
measured read bandwidth. Prefill is bound by matrix multiplication: its share is (2 x weights x tokens) / time over
the rate of one large GEMM, in bfloat16 where this CPU has instructions for it, else in float32. Limits and engine are
measured in turns, so that a machine whose speed drifts (neighbours, clock) moves both; medians of the rounds are
reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.plan import EnginePlan
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import SizedQuantizer
from engine.execution.captured import capture_steps
from engine.execution.kv_cache import KVCache
from engine.execution.model import ForwardBatch, LoweredModel
from engine.startup.build import load_plan

BLOCK_SIZE = 16
READ_BYTES = 1 << 30
"""Larger than the last-level cache a virtual machine may really use."""


@dataclass(frozen=True, slots=True)
class Loaded:
    overrides: tuple[str, ...]
    plan: EnginePlan
    model: LoweredModel
    kv: KVCache
    head_is_embedding: bool

    @property
    def label(self) -> str:
        return " ".join(self.overrides) or "defaults"


def load(path: Path, overrides: Sequence[str], num_blocks: int) -> Loaded:
    plan = assemble([f"model.path={path}", "device=cpu", f"kv_allocator.block_size={BLOCK_SIZE}", *overrides])
    bound = bind(plan)
    model = load_plan(plan, bound)
    kv = KVCache(plan.model, bound.kv_format, num_blocks, BLOCK_SIZE, plan.dtype, "cpu")
    model = capture_steps(model, kv, num_blocks * BLOCK_SIZE)
    shared = head_is_embedding(plan.model, bound.quantizer, getattr(torch, plan.dtype))
    return Loaded(tuple(overrides), plan, model, kv, shared)


def make_batch(rows: int, past: int, new: int) -> ForwardBatch:
    """``rows`` sequences with ``past`` tokens cached and ``new`` tokens to compute."""
    blocks_per_row = -(-(past + new) // BLOCK_SIZE)
    tables = torch.arange(rows * blocks_per_row, dtype=torch.int32).view(rows, blocks_per_row)
    positions = torch.arange(past, past + new)
    slots = tables.long()[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    attention = AttentionBatch(
        (new,) * rows,
        (past + new,) * rows,
        tables,
        torch.arange(0, rows * new + 1, new, dtype=torch.int32),
        torch.full((rows,), past + new, dtype=torch.int32),
        BLOCK_SIZE,
    )
    table_rows = torch.arange(rows).repeat_interleave(new)
    tokens = torch.arange(rows * new) % 1000
    return ForwardBatch(tokens, positions.repeat(rows), slots.flatten(), attention, table_rows)


def step(loaded: Loaded, batch: ForwardBatch, rows: int) -> None:
    hidden, _ = loaded.model.forward(batch, loaded.kv)
    loaded.model.head(hidden[-rows:]).argmax(dim=-1)


def seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(contestants: Sequence[Loaded], arguments: argparse.Namespace) -> None:
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)  # written, so that pages are real
    gemm_dtype, gemm = large_gemm()
    past, prompt, rows = arguments.past, arguments.prompt, arguments.rows
    decode, prefill, many = make_batch(1, past, 1), make_batch(1, 0, prompt), make_batch(rows, past, 1)
    runs: dict[tuple[str, str], tuple[Callable[[], object], int]] = {
        ("", "read"): (memory.sum, 1),
        ("", "gemm"): (gemm, 8),
    }
    for one in contestants:
        runs[one.label, "decode"] = (partial(step, one, decode, 1), 8)
        runs[one.label, "prefill"] = (partial(step, one, prefill, 1), 1)
        runs[one.label, "many"] = (partial(step, one, many, rows), 4)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for round_number in range(arguments.rounds + 1):
            for name, (run, repeats) in runs.items():
                taken = seconds(run, repeats)
                if round_number > 0:  # the first round warms up
                    times[name].append(taken)
    took = {name: statistics.median(values) for name, values in times.items()}
    bandwidth, rate = READ_BYTES / took["", "read"] / 1e9, 2 * 1024 * 2048 * 2048 / took["", "gemm"] / 1e9
    limits = f"read bandwidth {bandwidth:.1f} GB/s, {gemm_dtype} GEMM {rate:.0f} GFLOP/s"
    print(f"threads {torch.get_num_threads()}, {limits}")
    for one in contestants:
        report(
            one,
            arguments,
            {what: value for (label, what), value in took.items() if label == one.label},
            bandwidth,
            rate,
        )


def large_gemm() -> tuple[str, Callable[[], object]]:
    """``[1024, 2048] x [2048, 2048]`` in oneDNN's layout, and in which dtype."""
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    left, right = torch.randn(1024, 2048), torch.randn(2048, 2048)
    if supported:
        left, right = left.bfloat16(), right.bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 1024)
    run = torch.ops.mkldnn._linear_pointwise.default
    return "bf16" if supported else "fp32", lambda: run(left, packed, None, "none", [], "")


def report(
    loaded: Loaded, arguments: argparse.Namespace, took: dict[str, float], bandwidth: float, gemm_rate: float
) -> None:
    kv_bytes = loaded.kv.num_bytes / (loaded.kv.num_blocks * BLOCK_SIZE)
    read = least_bytes(loaded) + arguments.past * kv_bytes
    decode_rate = read / took["decode"] / 1e9
    prefill_rate = 2 * count_parameters(loaded.plan.model) * arguments.prompt / took["prefill"] / 1e9
    plan, weights = loaded.plan, loaded.model.weights_bytes / 1e6
    print(f"\n{loaded.label}: {plan.dtype}, {plan.execution}, weights {weights:.0f} MB")
    for line in loaded.model.lowering:
        print("   ", line)
    print(
        f"  decode    {took['decode'] * 1e3:8.2f} ms/token at {arguments.past} cached: {decode_rate:.1f} GB/s "
        f"= {100 * decode_rate / bandwidth:.0f} % of the read bandwidth"
    )
    print(
        f"  prefill   {took['prefill'] * 1e3:8.1f} ms for {arguments.prompt} tokens: {prefill_rate:.0f} GFLOP/s "
        f"= {100 * prefill_rate / gemm_rate:.0f} % of the GEMM rate"
    )
    print(f"  {arguments.rows} rows    {took['many'] * 1e3:8.2f} ms/step: {arguments.rows / took['many']:.0f} tokens/s")


def least_bytes(loaded: Loaded) -> int:
    """Every weight once, and one row of the embedding: what a token must read."""
    facts = loaded.plan.model
    embedding = facts.vocab_size * facts.hidden_size * getattr(torch, loaded.plan.dtype).itemsize
    return loaded.model.weights_bytes - (0 if loaded.head_is_embedding else embedding)


def head_is_embedding(facts: ModelFacts, quantizer: object, dtype: torch.dtype) -> bool:
    """Whether the vocabulary projection multiplies with the embedding's own memory, not with weights beside it."""
    spec = LinearSpec((LinearPart("head", facts.vocab_size),), facts.hidden_size, kind="head")
    sized = isinstance(quantizer, SizedQuantizer)
    return facts.tie_embeddings and sized and quantizer.packed_bytes(spec, dtype, "cpu", True) == 0


def count_parameters(facts: ModelFacts) -> int:
    """Weights of the body's linear layers: what each prompt token is multiplied with (the head runs on one row)."""
    attention = facts.head_dim * (2 * facts.num_heads + 2 * facts.num_kv_heads)
    return facts.num_layers * facts.hidden_size * (attention + 3 * facts.intermediate_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="'KEY=VALUE ...'",
        help="overrides of one contestant; repeat for more",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--past", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    blocks = max(arguments.rows * (-(-(arguments.past + 1) // BLOCK_SIZE)), -(-arguments.prompt // BLOCK_SIZE))
    contestants = [load(arguments.model, overrides.split(), blocks) for overrides in arguments.set or [""]]
    measure(contestants, arguments)


if __name__ == "__main__":
    main()
