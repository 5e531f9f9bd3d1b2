"""What drafting costs: decode steps with an EAGLE3 head of random weights on Llama-3.1-8B's shape, by drafts a step.

A step verifies the drafts of the step before, writes the head's keys and values for what it computed, and drafts anew.
It takes as long whether its drafts are accepted or not: the same tokens are computed. With random weights hardly any
is accepted, so what a step would take per token at an acceptance length (tokens a step yields) is the measured step
divided by that length. That is a simulation of acceptance, and said to be one in the rows; nothing else is simulated.
Steps run as the engine serves them: in the smallest captured shape that holds them, so some numbers of drafts cost what
the next larger one does.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.assembly.compose import quoted
from engine.contracts.events import StepEvent
from engine.contracts.request import SamplingParams
from gpu_check import floors
from gpu_check.draft_head import HeadShape
from gpu_check.engine_run import DecodeStep, EngineRun
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import Shape, folder_of, head_folder_of, shape_of
from gpu_check.speed import context_tokens
from gpu_check.speed_formats import PLANS

BATCHES = (1, 4, 16)
MAX_DRAFTS = 6
STEPS, WARM_UP = 24, 4
LENGTHS = (2, 3, 4, 5)
FORMATS: dict[str, tuple[float, list[str]]] = {"bf16": (2.0, []), "fp8": PLANS["fp8"]}
"""Bytes per weight, and what is asked for."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Medians of decode steps of one number of drafts, in milliseconds. On a CPU and for uncaptured drafting by the
    host's clock."""

    num_draft_tokens: int
    whole: float
    """From the results of the step before to this one's."""
    verify: float
    """The model's pass over the last token and the drafts of every request."""
    draft: float
    """The head: draft KV sync, and drafting."""
    accepted: int
    """Drafts accepted, of all steps and requests together."""

    @property
    def rest(self) -> float:
        return self.whole - self.verify - self.draft


@dataclass(frozen=True, slots=True)
class Plain:
    """Medians of steps without a drafter, in milliseconds."""

    wall_ms: float
    device_ms: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in one weight format, with a head."""

    title: str
    context: Context
    shape: Shape
    bytes_per_weight: float

    def bars(self, batch: int, num_draft_tokens: int | None = None) -> floors.Bars:
        """Of a plain step, or of one with so many drafts."""
        tokens = context_tokens(self.context.dry_run) + STEPS // 2
        work = floors.decode(self.shape, batch, tokens, weight=self.bytes_per_weight)
        if num_draft_tokens is not None:
            drafts = floors.drafting(HeadShape(self.shape), num_draft_tokens, self.bytes_per_weight)
            work = floors.both(work, drafts)
        return self.context.bars(work)


def run(context: Context) -> None:
    name = "1b" if context.dry_run else context.section.argument
    shape, folder = shape_of(name, context.dry_run), folder_of(name, context.scratch)
    head = head_folder_of(name, context.scratch)
    if not (head / "config.json").exists():
        raise RuntimeError(f"there is no head {head}: the section prepare did not get that far")
    for title, (per_weight, asked) in formats(context.dry_run).items():
        subject = Subject(f"{name} {title}", context, shape, per_weight)
        if all(is_there(subject, batch) for batch in batches(context.dry_run)):
            continue
        plain = plain_steps(subject, folder, asked)
        give_back_memory()
        drafted_steps(subject, folder, head, asked, plain)
        give_back_memory()


def formats(dry_run: bool) -> dict[str, tuple[float, list[str]]]:
    return {"float32": (4.0, []), "int8": (1.0, ["quantizer=int8"])} if dry_run else FORMATS


def batches(dry_run: bool) -> tuple[int, ...]:
    return (1, 2) if dry_run else BATCHES


def numbers_of_drafts(dry_run: bool) -> tuple[int, ...]:
    return (1, 4) if dry_run else tuple(range(1, MAX_DRAFTS + 1))


def overrides(dry_run: bool) -> list[str]:
    """Room for the largest batch, and nothing that would make a step more than it is."""
    most, tokens, budget = (4, 1024, 128) if dry_run else (max(BATCHES), 32768, 2048)
    length = context_tokens(dry_run) + 8 * (STEPS + WARM_UP)
    return [
        "scheduler=continuous", f"scheduler.token_budget={budget}", f"scheduler.max_requests={most}", "overlap=true",
        f"model.max_len={length}", f"memory.kv_tokens={tokens}",
    ]  # fmt: skip


def give_back_memory() -> None:
    """What an engine that is gone had on the card, its graphs included, before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def plain_steps(subject: Subject, folder: Path, asked: Sequence[str]) -> dict[int, Plain]:
    """A step of each batch size without a drafter: the unit of all that follows."""
    dry_run = subject.context.dry_run
    engine = EngineRun(folder, subject.context.device, [*overrides(dry_run), "drafter=none", *asked])
    found = {}
    for batch in batches(dry_run):
        steps = [engine.decode(batch, context_tokens(dry_run), STEPS + WARM_UP) for _ in range(2)][-1]
        found[batch] = step = medians(steps)
        metric = f"{subject.title}: batch {batch}, plain step"
        subject.context.emit(time_row(metric, step.wall_ms, subject.bars(batch), detail={"device_ms": step.device_ms}))
    engine.close()
    return found


def medians(steps: Sequence[DecodeStep]) -> Plain:
    """Each of its own: the step of median length on the host's clock may be any on the device's."""
    return Plain(
        statistics.median(step.wall_ms for step in steps), statistics.median(step.event.device_ms for step in steps)
    )


def drafted_steps(subject: Subject, folder: Path, head: Path, asked: Sequence[str], plain: dict[int, Plain]) -> None:
    """Decode steps of every number of drafts and batch size with a head, and what they would come to."""
    context, dry_run = subject.context, subject.context.dry_run
    drafter = ["drafter=eagle3", f"drafter.path={quoted(str(head))}", f"drafter.max_width={MAX_DRAFTS}"]
    engine = EngineRun(folder, context.device, [*overrides(dry_run), *drafter, *asked])
    context.emit(Row(f"{subject.title}: engine with a head built", round(engine.build_s, 1), "s"))
    for batch, step in plain.items():
        if is_there(subject, batch):
            continue
        for num_draft_tokens in (0, *numbers_of_drafts(dry_run)):
            found = measure(engine, batch, context_tokens(dry_run), num_draft_tokens)
            context.emit(step_row(subject, found, batch, step, subject.bars(batch, num_draft_tokens)))
        for length in LENGTHS:
            context.emit(length_row(subject, found, batch, step, length))
    engine.close()


def measure(engine: EngineRun, batch: int, context: int, num_draft_tokens: int) -> Drafted:
    """Steps in which each of ``batch`` requests verifies ``num_draft_tokens`` drafts; 0: the head only syncs its KV."""
    sampling = SamplingParams(max_tokens=8 * (STEPS + WARM_UP), temperature=0.0, ignore_eos=True)
    vocab = engine.info.vocab_size - 8
    prompts = [tuple((i * 7919 + j * 31) % vocab + 4 for j in range(context)) for i in range(batch)]
    names = [engine.submit(prompt, sampling) for prompt in prompts]
    # Configuration fixes one number of drafts for an engine's life, and to build an engine for each takes minutes.
    with engine.core.drafting(num_draft_tokens):
        steps = run_steps(engine, names, num_draft_tokens)
    if len(steps) < STEPS + WARM_UP:
        what = f"steps of {batch} requests with {num_draft_tokens} drafts"
        raise RuntimeError(f"{len(steps)} {what}; expected {STEPS + WARM_UP}")
    return summed_up(steps[WARM_UP : WARM_UP + STEPS], num_draft_tokens)


def run_steps(engine: EngineRun, names: Sequence[str], num_draft_tokens: int) -> list[DecodeStep]:
    """Until there are enough, or the requests have ended. Raises ``RuntimeError`` if one fails."""
    steps: list[DecodeStep] = []
    before = time.perf_counter()
    while engine.core.has_work:
        done = engine.core.step()
        now = time.perf_counter()
        if errors := [out.error for out in done.outputs if out.error]:
            raise RuntimeError(errors[0])
        events = [event for event in done.events if isinstance(event, StepEvent)]
        steps += [DecodeStep((now - before) * 1e3, e) for e in events if is_drafted(e, len(names), num_draft_tokens)]
        before = now if events else before
        if len(steps) >= STEPS + WARM_UP:
            engine.core.abort(names)
    return steps


def is_drafted(event: StepEvent, batch: int, num_draft_tokens: int) -> bool:
    """All requests decode, and each verifies ``num_draft_tokens`` drafts."""
    return event.num_requests == batch and event.num_prefill_tokens == 0 and event.drafted == batch * num_draft_tokens


def summed_up(steps: Sequence[DecodeStep], num_draft_tokens: int) -> Drafted:
    whole = statistics.median(r.wall_ms for r in steps)
    verify = statistics.median(r.event.device_ms for r in steps)
    draft = statistics.median(r.event.draft_ms for r in steps)
    # By the host's clock drafting begins while the model is still at work.
    draft = max(0.0, min(draft, whole - verify))
    return Drafted(num_draft_tokens, whole, verify, draft, sum(r.event.accepted for r in steps))


def step_row(subject: Subject, found: Drafted, batch: int, plain: Plain, bars: floors.Bars) -> Row:
    """A decode step in its parts; ``c``: a draft, KV sync included, ``v``: verifying, in plain steps on the device."""
    step, num_drafts = plain.device_ms, found.num_draft_tokens
    c, v = found.draft / max(1, num_drafts) / step, found.verify / step
    what = f"{num_drafts} drafts" if num_drafts else "no drafts, KV sync only"
    parts = f"{found.verify:.3g} verify + {found.draft:.3g} draft + {found.rest:.2g} rest = {found.whole:.4g}"
    detail: dict[str, Any] = {
        "step_ms": found.whole, "verify_ms": found.verify, "draft_ms": found.draft, "rest_ms": found.rest,
        "c": c, "v": v, "accepted": found.accepted, "steps": STEPS, "plain_device_ms": step,
    }  # fmt: skip
    return Row(
        f"{subject.title}: batch {batch}, decode step of {what}", f"c {c:.3f}, v {v:.2f}: {parts}", "ms",
        limit=bars.limit, share=None if bars.limit is None else bars.limit / found.whole, floor=bars.floor,
        is_check=False, detail=detail,
    )  # fmt: skip


def length_metric(subject: Subject, batch: int, num_draft_tokens: int, length: int) -> str:
    """The name of the row."""
    return f"{subject.title}: batch {batch}, {num_draft_tokens} drafts, acceptance length {length} (simulated)"


def is_there(subject: Subject, batch: int) -> bool:
    """Whether a run that is gone on with has the last row of this batch size, and so all of them."""
    most = numbers_of_drafts(subject.context.dry_run)[-1]
    return subject.context.has(length_metric(subject, batch, most, LENGTHS[-1]))


def length_row(subject: Subject, found: Drafted, batch: int, plain: Plain, length: int) -> Row:
    """Milliseconds per token if every step yielded ``length`` tokens."""
    ms, bars = found.whole / length, subject.bars(batch, found.num_draft_tokens).times(1 / length)
    metric = length_metric(subject, batch, found.num_draft_tokens, length)
    detail = {"speed_up": plain.wall_ms / ms, "plain_ms": plain.wall_ms, "simulated": "the step / the length"}
    return time_row(metric, round(ms, 4), bars, unit="ms/token", detail=detail)
