"""Ladders made by hand: as if their runs had been measured."""

from __future__ import annotations

from collections.abc import Sequence

from engine_lab.ladder.analysis import summarise_ladder
from engine_lab.ladder.comparisons import plan
from engine_lab.ladder.record import Baseline, Ladder, Measured, Output, Run, Survey
from engine_lab.ladder.rungs import Rung, merged

OPTIONS = {"pairs": 10, "level": 0.95, "requests": 4, "concurrency": 1, "rate": None, "shared_prefix": 0.8}
OPTIONS |= {"prompt_tokens": "100", "output_tokens": "10"}
NOISE = (0.97, 1.02, 0.99, 1.04, 1.0, 0.96, 1.01, 1.03, 0.98, 1.005)
RUNGS = [Rung("streaming", ("workload.stream=true",)), Rung("<quantizer>", ("quantizer=int8",))]
FACTS = {"weights_bytes": 4e6, "kv_bytes": 1e6, "kv_tokens": 1100.0, "planned_bytes": 6e6, "resident_bytes": 7e6}


def a_run(factor: float, itl: float | None = 2.0, goodput: float | None = None, failed: int = 0) -> Run:
    """All latencies are ``factor`` times those of any other."""
    figures = {"output_p50": 10.0 * factor, "ttft_p50": 8.0 * factor, "ttft_p95": 20.0 * factor, "e2e_p50": 50 * factor}
    figures |= {"itl": None if itl is None else itl * factor, "goodput": goodput}
    return Run(figures, 4, failed, 400, 200, 40, None, 0.1, 50)


def pairs(ratio: float, count: int = 10) -> list[tuple[Run, Run]]:
    """Of runs of which the second takes ``ratio`` times as long, with some noise."""
    return [(a_run(1.0), a_run(ratio * noise)) for noise in NOISE[:count]]


def a_ladder(ratios: Sequence[float], count: int = 10, num_same: int = 0, rungs: Sequence[Rung] = RUNGS) -> Ladder:
    """Comparisons in the order of their plan with such ratios; A/A has that of 1."""
    base = ("+preset=baseline",)
    ladder = Ladder(base, list(rungs), dict(OPTIONS), model="a <b> & c")
    ladder.engine = Baseline("a CPU", "cpu", "float32", 1e6)
    ladder.floor = {
        "read_gb_s": 4.0,
        "others": 0.0,
        "ways": [{"weights": "float32", "is_chosen": True, "gflops": {"512": 100.0}}],
    }
    words = base
    ladder.surveys = [Survey("", words, facts=FACTS, outputs=[Output("one two", ["one", " two"], [3.0, 0.5])])]
    for rung, text in zip(rungs, ("one two", "one too")):
        words = merged(words, rung.words)
        ladder.surveys.append(
            Survey(rung.name, words, facts=FACTS, outputs=[Output(text, ["one", " two"], [3.0, 0.5])])
        )
    planned = plan(base, rungs, num_same=num_same)
    for comparison, ratio in zip(planned, [*ratios, *(1.0 for _ in range(num_same))], strict=True):
        measured = Measured(comparison.kind, comparison.name, comparison.before, comparison.after)
        measured.pairs = pairs(ratio, count)
        ladder.comparisons.append(measured)
    ladder.summary = summarise_ladder(ladder)
    return ladder
