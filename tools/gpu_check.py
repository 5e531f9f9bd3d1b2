"""Check and measure the engine on this machine's GPU, in one command and without a network.

    python tools/gpu_check.py

Prints what the device is, what it can copy and multiply per second, whether every attention kernel equals the float64
reference, how fast the Triton one is as a share of those rates, and whether every preset decodes the same greedy
tokens as float32 on the CPU. Writes everything to ``benchmarks/<gpu>-<date>.json``.

Exit code: 0 all checks passed, 1 a check failed, 2 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.testing.attention_cases import (
    LARGE_CASES,
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    PlainFormat,
    error,
    make_context,
    make_inputs,
    measure,
    reference,
)

REPOSITORY = Path(__file__).resolve().parents[1]
PRESETS = ("baseline", "latency", "throughput", "balanced")
PROMPTS = (
    "What does json.dumps do?",
    "What does os.path.join do?",
    "What does itertools.chain do?",
    "What does math.sqrt do?",
)
GB = 1e9
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(SECTIONS), help="run these sections only")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks", help="folder of the JSON report")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu_check: torch {torch.__version__} finds no CUDA device; there is nothing to check", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"when": datetime.datetime.now().isoformat(timespec="seconds"), "device": device_facts()}
    show("device", report["device"])
    report["rates"] = rates()
    show("rates", report["rates"])
    failed = False
    for name, section in SECTIONS.items():
        if chosen.only is None or name in chosen.only:
            rows = section(report["rates"])
            report[name] = rows
            show_rows(name, rows)
            failed |= any(row["result"] not in ("ok", "measured") for row in rows)
    path = write_report(report, chosen.output)
    console.print(f"[bold]{'FAILED' if failed else 'passed'}[/]; report: {path}")
    return int(failed)


def device_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / GB, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton"),
        "python": platform.python_version(),
        "host_cores": os.cpu_count(),
    }


def rates() -> dict[str, float]:
    """What the device can do at best, measured: every other number is a share of these."""
    numel = min(1 << 29, torch.cuda.mem_get_info()[0] // 16)
    source = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy_ms = time_ms(lambda: target.copy_(source))
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    gemm_ms = time_ms(lambda: a @ b)
    return {
        "copy_gb_s": round(2 * source.numel() * 2 / copy_ms / 1e6, 1),
        "gemm_bf16_tflop_s": round(2 * size**3 / gemm_ms / 1e9, 1),
    }


def time_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median device time of one call in milliseconds, after three calls to warm up."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def kernels() -> dict[str, Callable[[BuildContext], Any]]:
    from engine_plugins.attention_kernel.torch_paged import TorchAttention
    from engine_plugins.attention_kernel.triton.kernel import TritonAttention

    return {
        "torch": lambda context: TorchAttention(SlotConfig(), context),
        "triton": lambda context: TritonAttention(SlotConfig(), context),
    }


def conformance(_: dict[str, float]) -> list[dict[str, Any]]:
    """Every kernel, every case, every dtype, against float64."""
    rows = []
    for name, make in kernels().items():
        for dtype, tolerance in TOLERANCE.items():
            for case in SMALL_CASES + LARGE_CASES:
                row = {"kernel": name, "dtype": dtype, "case": case.name, "tolerance": tolerance}
                rows.append(row | checked(partial(measure, make, case, dtype, "cuda"), tolerance))
    return rows


def checked(run: Callable[[], float], tolerance: float) -> dict[str, Any]:
    """The outcome of one check; what it raised is part of the report and makes it fail."""
    try:
        worst = run()
    except Exception as problem:
        traceback.print_exc()
        return {"result": f"{type(problem).__name__}: {problem}"[:300]}
    return {"result": "ok" if worst <= tolerance else "too large", "error": f"{worst:.1e}"}


def graphs(_: dict[str, float]) -> list[dict[str, Any]]:
    """A captured call, replayed on longer contexts and fewer queries than it was captured with."""
    cases = [case for case in SMALL_CASES + LARGE_CASES if case.name in ("verify", "decode_batch", "verify_batch")]
    return [
        {"case": case.name, "tolerance": TOLERANCE["float32"]}
        | checked(partial(replay_error, case), TOLERANCE["float32"])
        for case in cases
    ]


def replay_error(case: AttentionCase) -> float:
    inputs = make_inputs(case, "float32", "cuda")
    real, widest = inputs.batch, max(q_len for q_len, _ in case.rows)
    lengths = real.kv_lens_device.clone()
    staged_as = dataclasses.replace(real, q_lens=(widest,) * len(case.rows), kv_lens=(widest,) * len(case.rows))
    kernel = kernels()["triton"](make_context(case, "float32", "cuda"))
    staged = kernel.stage(staged_as)
    real.kv_lens_device.fill_(widest)
    once = recorder(kernel, staged, case, inputs)
    once()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = once()
    real.kv_lens_device.copy_(lengths)
    graph.replay()
    torch.cuda.synchronize()
    return error(out, reference(case, inputs))


def recorder(kernel: Any, staged: Any, case: AttentionCase, inputs: AttentionInputs) -> Callable[[], torch.Tensor]:
    return lambda: kernel.record(staged, case.op, inputs.q, inputs.k_cache, inputs.v_cache, PlainFormat(), None, None)


def speed(rates: dict[str, float]) -> list[dict[str, Any]]:
    """Time per layer of the Triton kernel inside a graph; decode against copy bandwidth, prefill against GEMM rate."""
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    cases = [
        AttentionCase(f"decode_{rows}x{length}", ((1, length),) * rows, **heads)
        for rows, length in ((1, 1000), (1, 8000), (1, 32000), (8, 4000), (32, 4000))
    ]
    cases += [AttentionCase("verify_8_of_8000", ((8, 8000),), **heads)]
    cases += [AttentionCase(f"prefill_{n}", ((n, n),), **heads) for n in (512, 2048, 8192)]
    return [speed_of(case, rates) for case in cases]


def speed_of(case: AttentionCase, rates: dict[str, float]) -> dict[str, Any]:
    inputs = make_inputs(case, "bfloat16", "cuda")
    kernel = kernels()["triton"](make_context(case, "bfloat16", "cuda"))
    once = recorder(kernel, kernel.stage(inputs.batch), case, inputs)
    once()
    torch.cuda.synchronize()
    layers, graph = 8, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(layers):
            once()
    ms = time_ms(graph.replay) / layers
    read = sum(kv_len for _, kv_len in case.rows) * case.num_kv_heads * case.head_dim * 2 * 2
    pairs = sum(q_len * (kv_len - (q_len - 1) / 2) for q_len, kv_len in case.rows)
    flop = 4 * pairs * case.num_heads * case.head_dim
    row = {"case": case.name, "result": "measured", "us": round(ms * 1e3, 1)}
    if case.name.startswith("prefill"):
        return row | {
            "tflop_s": round(flop / ms / 1e9, 1),
            "of_gemm": share(flop / ms / 1e9, rates["gemm_bf16_tflop_s"]),
        }
    # One layer's keys and values may stay in L2 over the repeats, so a share above 100 % is possible for short ones.
    return row | {"gb_s": round(read / ms / 1e6, 1), "of_copy": share(read / ms / 1e6, rates["copy_gb_s"])}


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def engine(_: dict[str, float]) -> list[dict[str, Any]]:
    """Greedy tokens of the bundled model: every preset on the GPU against float32 on the CPU.

    float32 must agree token for token. bfloat16 may part at near-ties; where it does is reported.
    """
    want = greedy(["+preset=baseline", "device=cpu", "model.dtype=float32"])
    rows = []
    for preset in PRESETS:
        for dtype in ("float32", "bfloat16"):
            row: dict[str, Any] = {"preset": preset, "dtype": dtype}
            try:
                got = greedy([f"+preset={preset}", "device=cuda", f"model.dtype={dtype}"])
            except Exception as problem:
                traceback.print_exc()
                rows.append(row | {"result": f"{type(problem).__name__}: {problem}"[:300]})
                continue
            firsts = [first_difference(a, b) for a, b in zip(want, got, strict=True)]
            differing = sum(first is not None for first in firsts)
            verdict = "measured" if dtype != "float32" else "ok" if not differing else "tokens differ"
            rows.append(row | {"result": verdict, "prompts_that_differ": differing, "first_difference": firsts})
    return rows


def greedy(overrides: list[str]) -> list[tuple[int, ...]]:
    from engine import LLM

    llm = LLM("bundled", overrides=overrides)
    try:
        prompts = [llm.tokenizer.encode_chat_now([{"role": "user", "content": text}]) for text in PROMPTS]
        return [done.tokens for done in llm.generate(prompts, max_tokens=64, temperature=0.0)]
    finally:
        llm.close()


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Index of the first token that differs (or that only one has)."""
    pairs = zip(a, b, strict=False)
    unequal = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    return unequal if unequal is not None or len(a) == len(b) else min(len(a), len(b))


SECTIONS: dict[str, Callable[[dict[str, float]], list[dict[str, Any]]]] = {
    "conformance": conformance,
    "graphs": graphs,
    "speed": speed,
    "engine": engine,
}


def show(title: str, facts: dict[str, Any]) -> None:
    table = Table(title=title, show_header=False)
    for key, value in facts.items():
        table.add_row(key, str(value))
    console.print(table)


def show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console.print(table)


def write_report(report: dict[str, Any], folder: Path) -> Path:
    gpu = re.sub(r"[^a-z0-9]+", "-", report["device"]["name"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{gpu}-{report['when'][:10]}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
