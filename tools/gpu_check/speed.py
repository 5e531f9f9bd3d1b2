"""A model's speed against the card's limits and against the same model in transformers and in plain torch."""

from __future__ import annotations

import importlib.util
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from engine.step.graphs import StepGraphs
from gpu_check import floors
from gpu_check.contestants import Compiled, Contestant, Eager, Transformers
from gpu_check.engine_run import DecodeStep, EngineRun
from gpu_check.plain_llama import PlainLlama
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import Shape, folder_of, read, shape_of

BATCHES = (1, 8, 64)
PROMPTS = (32, 128, 512, 2048, 8192)
ROUNDS = 3
DECODED = 48
MOST_GAP_MS = 0.05
"""A step's gap below this is hidden: it is a few per cent of the shortest step."""
LEAST_SHARE = {("8b", 1): 0.8}
MOST_MS = {("1b", 1): 0.85}
LEAST_GEMM_SHARE = {("8b", 8192): 0.6}
LEDGER_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under measurement."""

    name: str
    shape: Shape
    run: EngineRun
    context: Context

    @property
    def itemsize(self) -> int:
        return 4 if self.context.dry_run else 2

    def bars(self, batch: int) -> floors.Bars:
        """Of a decode step, in the middle of the decoded text."""
        tokens = context_tokens(self.context.dry_run) + DECODED // 2
        return self.context.bars(floors.decode(self.shape, batch, tokens, weight=self.itemsize))


def context_tokens(dry_run: bool) -> int:
    return 32 if dry_run else 1024


def batches(dry_run: bool) -> tuple[int, ...]:
    return (1, 2) if dry_run else BATCHES


def run(context: Context) -> None:
    name = context.section.argument
    shape, folder = shape_of(name, context.dry_run), folder_of(name, context.scratch)
    if not folder.exists():
        raise RuntimeError(f"there is no checkpoint {folder}: the section prepare did not get that far")
    if not context.dry_run:
        torch.cuda.reset_peak_memory_stats()
    subject = Subject(name, shape, EngineRun(folder, context.device, overrides(context.dry_run)), context)
    decode_alone(subject)
    first_tokens(subject)
    start_and_ledger(subject)
    side_by_side(subject, read(folder, context.device))
    subject.run.close()


def overrides(dry_run: bool) -> list[str]:
    """Room for the largest batch and the longest prompt, and nothing that would make a step more than it is."""
    budget, most, tokens = (128, 4, 1024) if dry_run else (8192, 64, 81920)
    return [
        "scheduler=chunked_prefill", f"scheduler.token_budget={budget}", f"scheduler.max_requests={most}",
        "drafter=none", "overlap=true", f"model.max_len={budget + 256}", f"memory.kv_tokens={tokens}",
    ]  # fmt: skip


def decode_alone(subject: Subject) -> None:
    """Decode and the device's idle time between steps, with nothing else on the card."""
    dry_run = subject.context.dry_run
    for batch in batches(dry_run):
        metric, gap_metric = f"{subject.name}: decode, batch {batch}", f"{subject.name}: host gap, batch {batch}"
        if subject.context.has(metric, gap_metric):
            continue
        runs = [subject.run.decode(batch, context_tokens(dry_run), DECODED) for _ in range(1 if dry_run else 2)]
        steps = runs[-1]  # the first one met cold caches
        ms = statistics.median(step.wall_ms for step in steps)
        targets = {} if dry_run else {
            "least_share": LEAST_SHARE.get((subject.name, batch)), "most_ms": MOST_MS.get((subject.name, batch))
        }  # fmt: skip
        detail = spread(steps) | {"tokens_per_s": round(batch * 1e3 / ms, 1), "steps": len(steps)}
        subject.context.emit(time_row(metric, ms, subject.bars(batch), **targets, detail=detail))
        gap = statistics.median(step.event.gap_ms for step in steps)
        host = statistics.median(step.event.host_ms for step in steps)
        promised = not dry_run
        subject.context.emit(
            Row(
                gap_metric, gap, "ms", floor=0.0, is_check=False,
                detail={"host_ms": host}, target=f"<= {MOST_GAP_MS} ms" if promised else "",
                held=gap <= MOST_GAP_MS if promised else None,
            )
        )  # fmt: skip


def spread(steps: Sequence[DecodeStep]) -> dict[str, float]:
    walls = sorted(step.wall_ms for step in steps)
    return {"least_ms": walls[0], "p90_ms": walls[int(0.9 * (len(walls) - 1))], "most_ms": walls[-1]}


def first_tokens(subject: Subject) -> None:
    """TTFT of one prompt on an idle engine, against the measured GEMM rate."""
    dry_run = subject.context.dry_run
    for tokens in (32, 64) if dry_run else PROMPTS:
        metric = f"{subject.name}: TTFT, {tokens} tokens"
        if subject.context.has(metric):
            continue
        found = [subject.run.first_token(tokens) for _ in range(1 + ROUNDS)][1:]
        times, steps = [ms for ms, _ in found], [step for _, steps in found for step in steps]
        bars = subject.context.bars(floors.prefill(subject.shape, tokens, subject.itemsize))
        least = None if dry_run else LEAST_GEMM_SHARE.get((subject.name, tokens))
        captured = all(step.captured for step in steps)
        detail = {
            "ms": times, "host_ms": [step.host_ms for step in steps], "device_ms": [step.device_ms for step in steps],
            "captured": captured,
        }  # fmt: skip
        if captured:  # what the same takes if the host launches it
            with patch.object(StepGraphs, "find", lambda graphs, rows: None):
                detail["uncaptured_ms"] = [subject.run.first_token_ms(tokens) for _ in range(1 + ROUNDS)][1:]
        subject.context.emit(time_row(metric, statistics.median(times), bars, least_share=least, detail=detail))


def start_and_ledger(subject: Subject) -> None:
    """Phases of start-up, and how far the memory ledger is from what the driver has given out since before loading."""
    info, context = subject.run.info, subject.context
    phases = {phase.name: phase.seconds for phase in info.phases}
    context.emit(Row(f"{subject.name}: engine built", round(subject.run.build_s, 1), "s", detail=phases))
    metric, ledger = f"{subject.name}: memory ledger / real peak", info.ledger
    if ledger is None or context.dry_run:
        context.emit(Row(metric, detail="a CPU's ledger is checked by tools/benchmarks/memory_peak.py"))
        return
    peak = ledger.free_bytes - torch.cuda.mem_get_info()[0]
    ratio = ledger.total_bytes / peak
    lines = {line.name: [line.planned_bytes, line.measured_bytes] for line in ledger.lines}
    context.emit(
        Row(
            metric, round(ratio, 3), target=f"within {LEDGER_ERROR:.0%}", held=abs(ratio - 1) <= LEDGER_ERROR,
            detail={"planned": ledger.total_bytes, "taken": peak, "reserved": torch.cuda.max_memory_reserved()} | lines,
        )
    )  # fmt: skip


def side_by_side(subject: Subject, weights: dict[str, Tensor]) -> None:
    """Everybody in turns at each batch size, on the same weights; ratios of medians of the rounds."""
    dry_run = subject.context.dry_run
    same_model(subject, weights)
    for batch in batches(dry_run):
        if subject.context.has(*(ratio_metric(subject, batch, name) for name in names_of(batch))):
            continue
        contestants = enter(subject, weights, batch)
        times: dict[str, list[float]] = {name: [] for name in ("engine", *contestants)}
        for _ in range(1 if dry_run else ROUNDS):
            steps = subject.run.decode(batch, context_tokens(dry_run), DECODED)
            times["engine"].append(statistics.median(step.wall_ms for step in steps))
            for name, contestant in contestants.items():
                times[name].append(contestant.step_ms())
        ours = statistics.median(times["engine"])
        for name in contestants:
            theirs = statistics.median(times[name])
            metric, detail = ratio_metric(subject, batch, name), {"ms": theirs, "engine_ms": ours}
            target, held = ("", None) if dry_run else ("> 1", theirs > ours)
            subject.context.emit(
                Row(metric, round(theirs / ours, 2), "x", target=target, held=held, is_check=False, detail=detail)
            )


EAGER, COMPILED, TRANSFORMERS = "torch eager", "torch.compile + CUDA graph", "transformers generate"


def names_of(batch: int) -> tuple[str, ...]:
    """Who is measured beside the engine. The whole forward pass of transformers is compiled anew for each batch size,
    which takes longer than this section has."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    return (EAGER, COMPILED, TRANSFORMERS) if batch == 1 and has_transformers else (EAGER, COMPILED)


def ratio_metric(subject: Subject, batch: int, name: str) -> str:
    """The name of a contestant's row."""
    return f"{subject.name}: batch {batch}, {name} / engine"


def enter(subject: Subject, weights: dict[str, Tensor], batch: int) -> dict[str, Contestant]:
    """Those that run here; one that does not is a row that says why."""
    rows = context_tokens(subject.context.dry_run)
    makers: dict[str, Callable[[], Contestant]] = {
        EAGER: partial(Eager, subject.shape, weights, batch, rows),
        COMPILED: partial(Compiled, subject.shape, weights, batch, rows),
        TRANSFORMERS: partial(Transformers, subject.shape, weights, batch, rows),
    }
    found: dict[str, Contestant] = {}
    for name in names_of(batch):
        try:
            found[name] = makers[name]()
        except Exception as problem:
            traceback.print_exc()
            why = f"{type(problem).__name__}: {problem}"[:200]
            subject.context.emit(Row(ratio_metric(subject, batch, name), detail=why))
    return found


def same_model(subject: Subject, weights: dict[str, Tensor]) -> None:
    """The baseline computes the same model: greedy tokens. In bfloat16 near-ties part them, so there it is a count."""
    prompt, count = tuple(range(5, 29)), 16
    with torch.inference_mode():
        theirs = PlainLlama(subject.shape, weights, 1, 64).greedy(prompt, count)
    (ours,) = subject.run.generate([prompt], count)
    equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), count)
    held = equal == count if subject.context.dry_run else None
    subject.context.emit(Row(f"{subject.name}: first tokens as plain torch's", f"{equal} of {count}", held=held))
