"""Single-stream decode and prefill of a model on this CPU, as shares of what the machine can do in the same run.

    python tools/make_random_model.py /path/to/model
    python benchmarks/cpu_decode.py /path/to/model [--quantizer int8] [--threads 2]

Decode is bound by reading the weights once per token: its share is (weight + KV bytes per token) / time over the
measured read bandwidth. Prefill is bound by matrix multiplication: its share is (2 x weights x tokens) / time over
the rate of one large GEMM in the same dtype. Limits and engine are measured in turns, so that a machine whose speed
drifts (neighbours, clock) moves both; medians of the rounds are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.assembly.device_facts import device_facts
from engine.assembly.model_facts import model_facts
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.config import ParallelismConfig, SlotConfig
from engine.contracts.model import ModelFacts
from engine.execution.kv_cache import KVCache
from engine.execution.loading import load_model
from engine.execution.model import ForwardBatch, LoweredModel
from engine.testing.context import build_context
from engine_plugins.architecture.llama import LlamaArchitecture
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.kv_format.native import NativeFormat
from engine_plugins.parallelism.single import SingleDevice
from engine_plugins.quantizer.config import Int8Config, UnquantizedConfig
from engine_plugins.quantizer.int8 import Int8WeightOnly
from engine_plugins.quantizer.unquantized import Unquantized

BLOCK_SIZE = 16
READ_BYTES = 1 << 30
"""Larger than the last-level cache a virtual machine may really use."""


@dataclass(frozen=True, slots=True)
class Loaded:
    facts: ModelFacts
    model: LoweredModel
    kv: KVCache
    dtype: str


def load(path: Path, dtype: str, quantizer_name: str, activations: str, num_blocks: int) -> Loaded:
    facts = model_facts(str(path))
    dtype = facts.dtype if dtype == "auto" else dtype
    context = replace(build_context(block_size=BLOCK_SIZE), model=facts, dtype=dtype, device=device_facts("cpu"))
    kv_format = NativeFormat(SlotConfig(), context)
    quantizers = {
        "none": lambda: Unquantized(UnquantizedConfig(activations=activations), context),
        "int8": lambda: Int8WeightOnly(Int8Config(activations=activations), context),
    }
    model = load_model(
        facts,
        LlamaArchitecture(SlotConfig(), context).describe(facts),
        quantizers[quantizer_name](),
        TorchAttention(SlotConfig(), context),
        kv_format,
        SingleDevice(ParallelismConfig(), context),
        dtype,
        "cpu",
    )
    return Loaded(facts, model, KVCache(facts, kv_format, num_blocks, BLOCK_SIZE, dtype, "cpu"), dtype)


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
    return ForwardBatch(torch.arange(rows * new) % 1000, positions.repeat(rows), slots.flatten(), attention)


def step(loaded: Loaded, batch: ForwardBatch, rows: int) -> None:
    hidden, _ = loaded.model.forward(batch, loaded.kv)
    loaded.model.head(hidden[-rows:]).argmax(dim=-1)


def seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def median(values: list[float]) -> float:
    return statistics.median(values)


def measure(loaded: Loaded, arguments: argparse.Namespace) -> None:
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)  # written, so that pages are real
    gemm_dtype = getattr(torch, loaded.dtype)
    left, right = torch.randn(1024, 2048).to(gemm_dtype), torch.randn(2048, 2048).to(gemm_dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 1024)
    gemm = torch.ops.mkldnn._linear_pointwise.default
    past, prompt, rows = arguments.past, arguments.prompt, arguments.rows
    decode, prefill, many = make_batch(1, past, 1), make_batch(1, 0, prompt), make_batch(rows, past, 1)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "read": (memory.sum, 1),
        "decode": (lambda: step(loaded, decode, 1), 8),
        "gemm": (lambda: gemm(left, packed, None, "none", [], ""), 8),
        "prefill": (lambda: step(loaded, prefill, 1), 1),
        "many": (lambda: step(loaded, many, rows), 4),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for round_number in range(arguments.rounds + 1):
            for name, (run, repeats) in runs.items():
                taken = seconds(run, repeats)
                if round_number > 0:  # the first round warms up
                    times[name].append(taken)
    report(loaded, arguments, {name: median(values) for name, values in times.items()}, 2 * 1024 * 2048 * 2048)


def report(loaded: Loaded, arguments: argparse.Namespace, took: dict[str, float], gemm_flop: int) -> None:
    facts = loaded.facts
    kv_bytes = KVCache.block_bytes(facts, NativeFormat(SlotConfig(), build_context()), 1, loaded.dtype)
    parameters = count_parameters(facts)
    itemsize = 1 if arguments.quantizer == "int8" else getattr(torch, loaded.dtype).itemsize
    # Every weight once: what a token must read at least, whatever copies there are.
    head = facts.vocab_size * facts.hidden_size * getattr(torch, loaded.dtype).itemsize
    read = parameters * itemsize + head + arguments.past * kv_bytes
    bandwidth, rate = READ_BYTES / took["read"] / 1e9, gemm_flop / took["gemm"] / 1e9
    decode_rate = read / took["decode"] / 1e9
    prefill_rate = 2 * parameters * arguments.prompt / took["prefill"] / 1e9
    for line in loaded.model.lowering:
        print(" ", line)
    print(f"threads {torch.get_num_threads()}, weights {loaded.model.weights_bytes / 1e6:.0f} MB, {loaded.dtype}")
    print(
        f"decode    {took['decode'] * 1e3:8.2f} ms/token at {arguments.past} cached: {decode_rate:.1f} GB/s "
        f"= {100 * decode_rate / bandwidth:.0f} % of the read bandwidth ({bandwidth:.1f} GB/s)"
    )
    print(
        f"prefill   {took['prefill'] * 1e3:8.1f} ms for {arguments.prompt} tokens: {prefill_rate:.0f} GFLOP/s "
        f"= {100 * prefill_rate / rate:.0f} % of the {loaded.dtype} GEMM rate ({rate:.0f} GFLOP/s)"
    )
    print(f"{arguments.rows} rows    {took['many'] * 1e3:8.2f} ms/step: {arguments.rows / took['many']:.0f} tokens/s")


def count_parameters(facts: ModelFacts) -> int:
    """Weights of the body's linear layers: what each prompt token is multiplied with (the head runs on one row)."""
    attention = facts.head_dim * (2 * facts.num_heads + 2 * facts.num_kv_heads)
    return facts.num_layers * facts.hidden_size * (attention + 3 * facts.intermediate_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantizer", choices=("none", "int8"), default="none")
    parser.add_argument("--activations", default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--past", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    blocks = max(arguments.rows * (-(-(arguments.past + 1) // BLOCK_SIZE)), -(-arguments.prompt // BLOCK_SIZE))
    loaded = load(arguments.model, arguments.dtype, arguments.quantizer, arguments.activations, blocks)
    measure(loaded, arguments)


if __name__ == "__main__":
    main()
