"""What drafting costs: rounds of an EAGLE3 head with random weights on Llama-3.1-8B's shape, by width.

A round verifies the drafts of the round before, keeps the head up with the model and drafts anew. It takes as long
whether its drafts stand or fall: the same tokens are computed. With random weights hardly any stands, so what a round
would take per token at an acceptance length (tokens a round yields) is the measured round divided by that length. That
is a simulation of acceptance, and said to be one in the rows; nothing else is simulated. Rounds run as the engine
serves them: in the smallest recorded shape that holds them, so some widths cost what the next wider one does.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.assembly.compose import quoted
from engine.contracts.events import StepEvent
from engine.contracts.request import SamplingParams
from gpu_check.draft_head import HeadShape
from gpu_check.engine_run import DecodeStep, EngineRun
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import Shape, folder_of, head_folder_of, shape_of
from gpu_check.speed import context_tokens
from gpu_check.speed_formats import PLANS

BATCHES = (1, 4, 16)
MAX_WIDTH = 6
ROUNDS, WARM_UP = 24, 4
LENGTHS = (2, 3, 4, 5)
FORMATS: dict[str, tuple[float, list[str]]] = {"bf16": (2.0, []), "fp8": PLANS["fp8"]}
"""Bytes per weight, and what is asked for."""
PUBLISHED_PLAIN, PUBLISHED = "published: 5.24 ms", "published: 2.2 ms at 3.9, 1.57 at 5.4"
"""Llama-3.1-8B-Instruct in bfloat16 at batch 1 on an H200, with an EAGLE3 chain of 7 drafts and without (SpecForge's
SpecBundle table, SGLang): 2.2 ms on MT-Bench, 1.57 on MATH500, at these acceptance lengths."""


@dataclass(frozen=True, slots=True)
class Round:
    """Medians of rounds of one width, in milliseconds. On a CPU and for unrecorded drafting by the host's clock."""

    width: int
    whole: float
    """From the results of the round before to this one's."""
    verify: float
    """The model's pass over the last token and the drafts of every request."""
    draft: float
    """The head: keeping up with the model, and drafting."""
    accepted: int
    """Drafts that stood, of all rounds and requests together."""

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

    def is_published(self, batch: int) -> bool:
        """Whether others have said what it takes them."""
        return batch == 1 and self.bytes_per_weight == FORMATS["bf16"][0]

    def limit_ms(self, batch: int, width: int | None = None) -> float:
        """The shortest the measured read bandwidth allows for a plain step, or for a round of ``width`` drafts."""
        tokens = context_tokens(self.context.rehearse) + ROUNDS // 2
        keys = self.shape.decode_bytes(batch, tokens, 2) - self.shape.decode_bytes(0, tokens, 2)
        least = self.bytes_per_weight * (self.shape.body + self.shape.head + keys / 2)
        if width is not None:
            least += HeadShape(self.shape).drafting_bytes(width, self.bytes_per_weight)
        return least / self.context.rates["read_gb_s"] / 1e6


def run(context: Context) -> None:
    name = "1b" if context.rehearse else context.section.argument
    shape, folder = shape_of(name, context.rehearse), folder_of(name, context.scratch)
    head = head_folder_of(name, context.scratch)
    if not (head / "config.json").exists():
        raise RuntimeError(f"there is no head {head}: the section prepare did not get that far")
    for title, (per_weight, asked) in formats(context.rehearse).items():
        subject = Subject(f"{name} {title}", context, shape, per_weight)
        plain = plain_steps(subject, folder, asked)
        give_back_memory()
        drafted_rounds(subject, folder, head, asked, plain)
        give_back_memory()


def formats(rehearse: bool) -> dict[str, tuple[float, list[str]]]:
    return {"float32": (4.0, []), "int8": (1.0, ["quantizer=int8"])} if rehearse else FORMATS


def batches(rehearse: bool) -> tuple[int, ...]:
    return (1, 2) if rehearse else BATCHES


def widths(rehearse: bool) -> tuple[int, ...]:
    return (1, 4) if rehearse else tuple(range(1, MAX_WIDTH + 1))


def overrides(rehearse: bool) -> list[str]:
    """Room for the largest batch, and nothing that would make a step more than it is."""
    most, tokens, budget = (4, 1024, 128) if rehearse else (max(BATCHES), 32768, 2048)
    length = context_tokens(rehearse) + 8 * (ROUNDS + WARM_UP)
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
    rehearse = subject.context.rehearse
    engine = EngineRun(folder, subject.context.device, [*overrides(rehearse), "drafter=none", *asked])
    found = {}
    for batch in batches(rehearse):
        steps = [engine.decode(batch, context_tokens(rehearse), ROUNDS + WARM_UP) for _ in range(2)][-1]
        found[batch] = step = medians(steps)
        metric = f"{subject.title}: batch {batch}, plain step"
        target = PUBLISHED_PLAIN if subject.is_published(batch) else ""
        row = time_row(metric, step.wall_ms, subject.limit_ms(batch), detail={"device_ms": step.device_ms})
        subject.context.emit(replace(row, target=target))
    engine.close()
    return found


def medians(steps: Sequence[DecodeStep]) -> Plain:
    """Each of its own: the step of median length on the host's clock may be any on the device's."""
    return Plain(
        statistics.median(step.wall_ms for step in steps), statistics.median(step.event.device_ms for step in steps)
    )


def drafted_rounds(
    subject: Subject, folder: Path, head: Path, asked: Sequence[str], plain: dict[int, Plain]
) -> None:
    """Rounds of every width and batch size with a head, and what they would come to."""
    context, rehearse = subject.context, subject.context.rehearse
    drafter = ["drafter=eagle3", f"drafter.path={quoted(str(head))}", f"drafter.max_width={MAX_WIDTH}"]
    engine = EngineRun(folder, context.device, [*overrides(rehearse), *drafter, *asked])
    context.emit(Row(f"{subject.title}: engine with a head built", round(engine.build_s, 1), "s"))
    for batch, step in plain.items():
        for width in (0, *widths(rehearse)):
            found = measure(engine, batch, context_tokens(rehearse), width)
            context.emit(round_row(subject, found, batch, step, subject.limit_ms(batch, width)))
        for length in LENGTHS:
            context.emit(length_row(subject, found, batch, step, length))
    engine.close()


def measure(engine: EngineRun, batch: int, context: int, width: int) -> Round:
    """Rounds in which each of ``batch`` requests verifies ``width`` drafts; 0: the head only keeps up."""
    sampling = SamplingParams(max_tokens=8 * (ROUNDS + WARM_UP), temperature=0.0, ignore_eos=True)
    vocab = engine.info.vocab_size - 8
    prompts = [tuple((i * 7919 + j * 31) % vocab + 4 for j in range(context)) for i in range(batch)]
    names = [engine.submit(prompt, sampling) for prompt in prompts]
    # Configuration fixes one width for an engine's life, and to build an engine for each takes minutes.
    with engine.core.drafting(width):
        rounds = run_rounds(engine, names, width)
    if len(rounds) < ROUNDS + WARM_UP:
        raise RuntimeError(f"{len(rounds)} rounds of {batch} requests with {width} drafts; expected {ROUNDS + WARM_UP}")
    return summed_up(rounds[WARM_UP : WARM_UP + ROUNDS], width)


def run_rounds(engine: EngineRun, names: Sequence[str], width: int) -> list[DecodeStep]:
    """Until there are enough, or the requests have ended. Raises ``RuntimeError`` if one fails."""
    rounds: list[DecodeStep] = []
    before = time.perf_counter()
    while engine.core.has_work:
        done = engine.core.step()
        now = time.perf_counter()
        if errors := [out.error for out in done.outputs if out.error]:
            raise RuntimeError(errors[0])
        events = [event for event in done.events if isinstance(event, StepEvent)]
        rounds += [DecodeStep((now - before) * 1e3, e) for e in events if is_round(e, len(names), width)]
        before = now if events else before
        if len(rounds) >= ROUNDS + WARM_UP:
            engine.core.abort(names)
    return rounds


def is_round(event: StepEvent, batch: int, width: int) -> bool:
    """All requests decode, and each verifies ``width`` drafts."""
    return event.num_requests == batch and event.num_prefill_tokens == 0 and event.drafted == batch * width


def summed_up(rounds: Sequence[DecodeStep], width: int) -> Round:
    whole = statistics.median(r.wall_ms for r in rounds)
    verify = statistics.median(r.event.device_ms for r in rounds)
    draft = statistics.median(r.event.draft_ms for r in rounds)
    # By the host's clock drafting begins while the model is still at work.
    draft = max(0.0, min(draft, whole - verify))
    return Round(width, whole, verify, draft, sum(r.event.accepted for r in rounds))


def round_row(subject: Subject, found: Round, batch: int, plain: Plain, limit_ms: float) -> Row:
    """A round in its parts; ``c``: a draft, keeping up included, ``v``: verifying, in plain steps on the device."""
    step, width = plain.device_ms, found.width
    c, v = found.draft / max(1, width) / step, found.verify / step
    what = f"{width} drafts" if width else "no drafts, the head keeps up"
    parts = f"{found.verify:.3g} verify + {found.draft:.3g} draft + {found.rest:.2g} rest = {found.whole:.4g}"
    detail: dict[str, Any] = {
        "round_ms": found.whole, "verify_ms": found.verify, "draft_ms": found.draft, "rest_ms": found.rest,
        "c": c, "v": v, "accepted": found.accepted, "rounds": ROUNDS, "plain_device_ms": step,
    }  # fmt: skip
    return Row(
        f"{subject.title}: batch {batch}, round of {what}", f"c {c:.3f}, v {v:.2f}: {parts}", "ms", limit=limit_ms,
        share=limit_ms / found.whole, is_check=False, detail=detail,
    )  # fmt: skip


def length_row(subject: Subject, found: Round, batch: int, plain: Plain, length: int) -> Row:
    """Milliseconds per token if every round yielded ``length`` tokens."""
    ms, limit = found.whole / length, subject.limit_ms(batch, found.width) / length
    return Row(
        f"{subject.title}: batch {batch}, {found.width} drafts, acceptance length {length} (simulated)",
        round(ms, 4), "ms/token", limit, limit / ms, PUBLISHED if subject.is_published(batch) else "", is_check=False,
        detail={"speed_up": plain.wall_ms / ms, "plain_ms": plain.wall_ms, "simulated": "the round / the length"},
    )  # fmt: skip
