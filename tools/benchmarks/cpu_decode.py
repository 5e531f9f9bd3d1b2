"""Single-stream decode and prefill of a model on this CPU, as shares of what the machine can do in the same run.

    python tools/make_random_model.py /path/to/model
    python tools/benchmarks/cpu_decode.py /path/to/model [--set execution=eager --set quantizer=int8] [--threads 2]

A step cannot be faster than its floor: the larger of (bytes of weights and cached keys and values it must read) / (read
bandwidth) and (operations of its linear layers) / (rate of one large product). Of experts those count that the step's
tokens are routed to. The rate is the best that torch or the engine's kernels reach with 1,024 rows: of bytes where
activations have 8 bits, of float32 where weights are float32, else of bfloat16. Limits and engine are measured in
turns, so that a machine whose speed drifts (neighbours, clock) moves both; medians of the rounds are reported. With
``--first`` measurements have real-time priority, and what others disturb all the same is measured again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from quiet import undisturbed

from engine import native
from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.plan import EnginePlan
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.contracts.ops import Experts, Linear, LinearPart, LinearSpec, Route
from engine.contracts.quantizer import Quantizer
from engine.kernels.context import Call, ForwardBatch
from engine.kernels.cpu.captured import capture_steps
from engine.kernels.cpu.linear import float_linear, integer_linear
from engine.kernels.model import LoweredModel, Step
from engine.kernels.packing import Target, packed_bytes
from engine.kv.cache import KVCache
from engine.kv.groups import one_group
from engine.startup.lowering import lowering_of
from engine.startup.rank import load_plan
from engine_lab.bench_machine.machine import READ_BYTES, reader
from engine_plugins.quantizer.rounding import to_int8

BLOCK_SIZE = 16
CHUNK = 128
"""Tokens of a prompt beside rows that decode."""
Rows = Sequence[tuple[int, int]]
"""Cached and new tokens of each sequence."""
LARGE = (1024, 2048, 2048)
"""Rows, outputs and inputs of a product that shows how fast this machine multiplies."""


@dataclass(frozen=True, slots=True)
class Loaded:
    overrides: tuple[str, ...]
    plan: EnginePlan
    model: LoweredModel
    kv: KVCache
    head_is_embedding: bool
    expert_bytes: tuple[int, ...]
    """Of one expert of each mixture, in the order of the graph."""

    @property
    def label(self) -> str:
        return " ".join(self.overrides) or "defaults"

    @property
    def arithmetic(self) -> str:
        """The kind of product that bounds its linear layers: of :func:`large_products`."""
        if "quantizer.activations=int8" in self.overrides:
            return "int8"
        is_rounded = self.plan.choice("quantizer").name not in ("checkpoint", "none")
        return "float32" if self.plan.dtype == "float32" and not is_rounded else "bfloat16"


def load(path: Path, overrides: Sequence[str], num_blocks: int) -> Loaded:
    plan = assemble([f"model.path={path}", "device=cpu", f"kv_allocator.block_size={BLOCK_SIZE}", *overrides])
    bound = bind(plan)
    model = load_plan(plan, bound)
    kv = KVCache(one_group(model.graph.caches), bound.kv_format, [num_blocks], BLOCK_SIZE, plan.dtype, "cpu")
    model = capture_steps(model, kv, num_blocks * BLOCK_SIZE)
    target = Target.of(lowering_of(plan, bound, model.graph))
    shared = head_is_embedding(plan.model, bound.quantizer, target)
    of_experts = [
        sum(packed_bytes(spec, bound.quantizer.format(spec), target) for spec in (op.gate_up, op.down))
        for op in mixtures(model.graph)
    ]
    return Loaded(tuple(overrides), plan, model, kv, shared, tuple(of_experts))


def make_batch(rows: Rows) -> ForwardBatch:
    """Sequences of cached tokens and new ones to compute."""
    total = max(cached + new for cached, new in rows)
    blocks_per_row = -(-total // BLOCK_SIZE)
    tables = torch.arange(len(rows) * blocks_per_row, dtype=torch.int32).view(len(rows), blocks_per_row)
    positions = torch.cat([torch.arange(cached, cached + new) for cached, new in rows])
    new_tokens = torch.tensor([new for _, new in rows])
    table_rows = torch.arange(len(rows)).repeat_interleave(new_tokens)
    slots = tables.long()[table_rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    ends = [cached + new for cached, new in rows]
    attention = AttentionBatch(
        tuple(new_tokens.tolist()),
        tuple(ends),
        tables,
        F.pad(new_tokens.cumsum(0), (1, 0)).to(torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        BLOCK_SIZE,
    )
    return ForwardBatch(torch.arange(len(positions)) % 1000, positions, (slots,), (attention,), table_rows)


def step(loaded: Loaded, batch: ForwardBatch) -> None:
    """The last new token of each row is followed by one that is chosen."""
    hidden, _ = loaded.model.forward(batch, loaded.kv)
    loaded.model.head(hidden[batch.attention[0].q_starts[1:].long() - 1]).argmax(dim=-1)


def mixtures(graph: Graph) -> list[Experts]:
    return [node.op for node in graph.nodes if isinstance(node.op, Experts)]


def chosen_experts(loaded: Loaded, batch: ForwardBatch) -> list[int]:
    """How many experts of each mixture some token of a step is routed to."""
    graph = loaded.model.graph
    chosen = {node.outputs[0] for node in graph.nodes if isinstance(node.op, Route)}
    found: list[int] = []

    def counted(call: Call) -> Call:
        def counting(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = call(*arguments)
            found.append(len(ids.unique()))
            return ids, weights

        return counting

    def of(step: Step) -> Step:
        return replace(step, call=counted(step.call)) if step.outputs and step.outputs[0] in chosen else step

    layers = tuple(replace(layer, steps=tuple(map(of, layer.steps))) for layer in loaded.model.layers)
    replace(loaded.model, layers=layers, small_steps=None).forward(batch, loaded.kv)
    return found


def seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(contestants: Sequence[Loaded], arguments: argparse.Namespace) -> None:
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)  # written, so that pages are real
    kinds = {"bfloat16", "int8"} | {one.arithmetic for one in contestants}
    products = {kind: large_products(kind) for kind in sorted(kinds)}
    past, prompt, rows = arguments.past, arguments.prompt, arguments.rows
    steps: dict[str, Rows] = {
        f"1 token, {past} cached": [(past, 1)],
        f"{prompt} tokens, 0 cached": [(0, prompt)],
        f"{rows} x 1 token, {past} cached": [(past, 1)] * rows,
        f"the same and {CHUNK} tokens, {past} cached": [(past, 1)] * rows + [(past, CHUNK)],
    }
    runs: dict[tuple[str, str], tuple[Callable[[], object], int]] = {("", "read"): (reader(memory), 1)}
    for kind, ways in products.items():
        runs |= {(kind, name): (run, 8) for name, run in ways.items()}
    experts: dict[tuple[str, str], list[int]] = {}
    for one in contestants:
        for name, of_rows in steps.items():
            batch = make_batch(of_rows)
            experts[one.label, name] = chosen_experts(one, batch)
            runs[one.label, name] = (partial(step, one, batch), 4)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for round_number in range(arguments.rounds + 1):
            for name, (run, repeats) in runs.items():
                taken = undisturbed(run, repeats) if arguments.first else seconds(run, repeats)
                if round_number > 0:  # the first round warms up
                    times[name].append(taken)
    took = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = READ_BYTES / took["", "read"]
    rates = {kind: 2 * math.prod(LARGE) / min(took[kind, name] for name in ways) for kind, ways in products.items()}
    shown = (f"{kind} {rate / 1e9:.0f} {'GOP/s' if kind == 'int8' else 'GFLOP/s'}" for kind, rate in rates.items())
    print(f"threads {torch.get_num_threads()}, read bandwidth {bandwidth / 1e9:.1f} GB/s, products: {', '.join(shown)}")
    print(f"\n| | step | ms | floor (ms) | floor / measured | bound by | MB read |\n{'|---' * 7}|")
    for one in contestants:
        rate = rates[one.arithmetic]
        facts = one.plan.model
        for name, of_rows in steps.items():
            num_bytes = least_bytes(one, experts[one.label, name]) + kv_bytes(one) * sum(map(sum, of_rows))
            read = num_bytes / bandwidth
            tokens = sum(new for _, new in of_rows)
            computed = 2 * (body_parameters(one.model.graph) * tokens + head_parameters(facts) * len(of_rows)) / rate
            floor, ms = max(read, computed), took[one.label, name]
            print(
                f"| {one.label} | {name} | {ms * 1e3:.1f} | {floor * 1e3:.1f} "
                f"| {100 * floor / ms:.0f} % | {'memory' if read > computed else 'arithmetic'} "
                f"| {num_bytes / 1e6:.0f} |"
            )
    for one in contestants:
        print(f"\n{one.label}: {one.plan.dtype}, {one.plan.execution}, weights {one.model.weights_bytes / 1e6:.0f} MB")
        for line in one.model.lowering:
            print("   ", line)


def large_products(kind: str) -> dict[str, Callable[[], object]]:
    """``[1024, 2048] x [2048, 2048]`` by torch, and by the engine's kernels where they are built. ``kind``: ``int8``,
    ``float32`` or ``bfloat16``."""
    rows, outputs, inputs = LARGE
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    spec = LinearSpec((LinearPart("w", outputs),), inputs)
    has_kernels = not isinstance(native.find_compiler(), str)
    if kind == "int8":
        has_kernels = has_kernels and integer_linear.has_instructions()
        left, right = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((rows, inputs), (inputs, outputs)))
        ways: dict[str, Callable[[], object]] = {"torch": lambda: torch._int_mm(left, right)}
        if has_kernels:
            layer = integer_linear.pack_integer(spec, to_int8(weight, None), "int8")
            ways["engine"] = lambda: layer.apply(x.bfloat16())
        return ways
    dtype = getattr(torch, kind)
    x, weight = x.to(dtype), weight.to(dtype)
    ways = {"torch": lambda: F.linear(x, weight)}
    if has_kernels:
        float_layer = float_linear.pack_float(spec, weight, None)
        ways["engine"] = lambda: float_layer.apply(x)
    return ways


def kv_bytes(loaded: Loaded) -> float:
    """Of a cached token."""
    return loaded.kv.num_bytes / (loaded.kv.num_blocks[0] * BLOCK_SIZE)


def least_bytes(loaded: Loaded, chosen: Sequence[int]) -> int:
    """Every weight once, but of mixtures only the ``chosen`` experts, and one row of the embedding: what a step must
    read."""
    facts = loaded.plan.model
    embedding = facts.vocab_size * facts.hidden_size * getattr(torch, loaded.plan.dtype).itemsize
    unread = sum(
        (op.num_experts - count) * num_bytes
        for op, count, num_bytes in zip(mixtures(loaded.model.graph), chosen, loaded.expert_bytes, strict=True)
    )
    return loaded.model.weights_bytes - unread - (0 if loaded.head_is_embedding else embedding)


def head_is_embedding(facts: ModelFacts, quantizer: Quantizer, target: Target) -> bool:
    """Whether the vocabulary projection multiplies with the embedding's own memory, not with weights beside it."""
    spec = LinearSpec((LinearPart("head", facts.vocab_size),), facts.hidden_size, kind="head")
    return facts.tie_embeddings and packed_bytes(spec, quantizer.format(spec), target, tied=True) == 0


def body_parameters(graph: Graph) -> int:
    """Weights of the body's linear layers: what each prompt token is multiplied with (the head runs on one row)."""
    used = [(node.op.spec, 1) for node in graph.nodes if isinstance(node.op, Linear) and node.op.spec.kind != "head"]
    used += [(spec, op.top_k) for op in mixtures(graph) for spec in (op.gate_up, op.down)]
    return sum(spec.in_features * spec.out_features * count for spec, count in used)


def head_parameters(facts: ModelFacts) -> int:
    return facts.vocab_size * facts.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder in Hugging Face layout, or bundled")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="'KEY=VALUE ...'",
        help="overrides of one contestant; repeat for more",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--past", type=int, default=512, help="cached tokens of a decode step (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="sequences decoded at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="medians are of so many (%(default)s)")
    parser.add_argument("--first", action="store_true", help="measure with real-time priority")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    per_row = -(-(arguments.past + CHUNK) // BLOCK_SIZE)
    blocks = max((arguments.rows + 1) * per_row, -(-arguments.prompt // BLOCK_SIZE))
    contestants = [load(arguments.model, overrides.split(), blocks) for overrides in arguments.set or [""]]
    measure(contestants, arguments)


if __name__ == "__main__":
    main()
