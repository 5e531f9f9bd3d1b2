"""Law 1 on the card: the bundled model's greedy tokens, whatever preset, execution and overlap, against a CPU's.

In float32 no token may differ. In bfloat16 an output may part from the reference where two tokens are closer together,
in float32, than bfloat16 moves them; how far it does move them is measured on the same prompts.
"""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass, field

from engine.service.tokenizer import Tokenizer
from engine.service.turns import Conversation, Turn
from gpu_check.engine_run import EngineRun, Tokens
from gpu_check.section import Context, Row

PRESETS = ("baseline", "latency", "throughput", "balanced")
QUESTIONS = ("json.dumps", "os.path.join", "itertools.chain", "math.sqrt")
COUNT = 48
LIMITS = ["scheduler.max_requests=8", "model.max_len=1024", "scheduler.token_budget=256"]


@dataclass
class Tally:
    """Of one preset."""

    outputs: int = 0
    margins: list[float] = field(default_factory=list)
    """Of each output that parts from the reference."""
    broken: list[str] = field(default_factory=list)


def run(context: Context) -> None:
    dtype, count = context.section.argument, 8 if context.dry_run else COUNT
    reference = EngineRun("bundled", "cpu", ["+preset=baseline", "model.dtype=float32", *LIMITS])
    prompts = make_prompts(reference.plan.model.path)[: 3 if context.dry_run else None]
    want = reference.generate(prompts, count, together=False)
    exact = reference.logprobs(prompts)
    noise = 0.0
    for preset in PRESETS[1:2] if context.dry_run else PRESETS:
        if context.has(metric_of(preset, dtype)):
            continue
        tally = Tally()
        executions = ("eager",) if context.dry_run else ("eager", "compile", "graphs")
        for execution, overlap in itertools.product(executions, ("true", "false")):
            overrides = [f"+preset={preset}", f"execution={execution}", f"overlap={overlap}", f"model.dtype={dtype}"]
            try:
                run = EngineRun("bundled", context.device, [*overrides, *LIMITS])
                got = run.generate(prompts, count)
                if dtype != "float32":
                    noise = max(noise, shift(exact, run.logprobs(prompts)))
                run.close()
            except Exception as problem:
                traceback.print_exc()
                tally.broken.append(f"{execution}, overlap={overlap}: {type(problem).__name__}: {problem}"[:200])
                continue
            tally.outputs += len(got)
            tally.margins += [margin(reference, p, a, b) for p, a, b in zip(prompts, got, want, strict=True) if a != b]
        context.emit(verdict(preset, dtype, tally, noise))
    reference.close()


def make_prompts(path: str) -> list[Tokens]:
    """Trained questions, and text of several lengths after a shared beginning, longer than a step's budget."""
    tokenizer = Tokenizer.from_directory(path)
    asked = [tokenizer.encode_chat_now(Conversation((Turn("user", f"What does {name} do?"),))) for name in QUESTIONS]
    text = tokenizer.encode_now((__doc__ or "") * 8)
    tokenizer.close()
    return [asked[0], text[:120], *asked[1:], text[:300], text[:200] + text[300:420], text[:1]]


def margin(reference: EngineRun, prompt: Tokens, got: Tokens, want: Tokens) -> float:
    """How far apart the two tokens are in float32 where the outputs part; infinite if one is not among the likely."""
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    (top,) = reference.logprobs([prompt + want[:at]])
    return abs(top[got[at]] - top[want[at]]) if got[at] in top and want[at] in top else float("inf")


def shift(exact: list[dict[int, float]], rounded: list[dict[int, float]]) -> float:
    """How far two tokens' logprobs move against each other at most, over the likely tokens of all prompts."""
    worst = 0.0
    for a, b in zip(exact, rounded, strict=True):
        moved = [a[token] - b[token] for token in a.keys() & b.keys()]
        worst = max(worst, max(moved) - min(moved))
    return worst


def metric_of(preset: str, dtype: str) -> str:
    """The name of a preset's row."""
    return f"{preset}, {dtype}: outputs that differ from the CPU's float32"


def verdict(preset: str, dtype: str, tally: Tally, noise: float) -> Row:
    metric = metric_of(preset, dtype)
    if tally.broken:
        return Row(metric, f"{len(tally.broken)} engines failed", target="0", held=False, detail=tally.broken)
    if not tally.outputs:
        return Row(metric, "no outputs", target="0", held=False)
    measured = f"{len(tally.margins)} of {tally.outputs}"
    if dtype == "float32":
        return Row(metric, measured, target="0", held=not tally.margins, detail={"margins": str(tally.margins)})
    largest = max(tally.margins, default=0.0)
    detail = {"margins": str(sorted(tally.margins)), "noise": noise}
    target = f"margins <= {noise:.3f}, bfloat16's own"
    return Row(metric, f"{measured}, margin {largest:.3f}", target=target, held=largest <= noise, detail=detail)
