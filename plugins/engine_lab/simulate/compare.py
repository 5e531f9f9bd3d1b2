"""Which of two plugin sets wins on the same trace.

Requests that queue behind each other are not independent, so the unit is a part of the trace: consecutive requests, of
which each figure is taken once. Both sets serve the same parts, so parts are pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.contracts.percentiles import describe
from engine_lab.shared.simulation.outcome import Outcome, SimulatedRequest
from engine_lab.shared.statistics import Estimate, paired_ratio

Requests = Sequence[SimulatedRequest]


def mean_ttft(requests: Requests) -> float:
    return sum(request.ttft_ms for request in requests) / len(requests)


def p95_ttft(requests: Requests) -> float:
    """0 of too few: nothing is said of it then."""
    return describe([(request.ttft_ms, 1) for request in requests])["p95"] or 0.0


def mean_itl(requests: Requests) -> float:
    gaps = sum(request.output_tokens - 1 for request in requests)
    return sum(request.decode_ms for request in requests) / gaps if gaps else 0.0


MEASURES: dict[str, Callable[[Requests], float]] = {
    "mean TTFT": mean_ttft,
    "P95 TTFT": p95_ttft,
    "mean ITL": mean_itl,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    measure: str
    ratio: Estimate | None
    """Of the compared set's figure to the first one's; ``None``: one of them is 0 somewhere."""

    @property
    def words(self) -> str:
        if self.ratio is None or not self.ratio.excludes(1.0):
            return "no difference shown"
        return "better" if self.ratio.value < 1.0 else "worse"


def compare(before: Outcome, after: Outcome, batches: int) -> tuple[Verdict, ...]:
    """Raises ``ValueError`` with fewer served requests than parts."""
    pairs = [pair for pair in zip(before.requests, after.requests, strict=True) if not any(r.error for r in pair)]
    if len(pairs) < batches:
        raise ValueError(f"--batches {batches}: both plugin sets serve only {len(pairs)} of the requests")
    bounds = [len(pairs) * part // batches for part in range(batches + 1)]
    parts = [pairs[start:end] for start, end in pairwise(bounds)]
    verdicts = []
    for name, measure in MEASURES.items():
        a, b = ([measure([pair[side] for pair in part]) for part in parts] for side in (0, 1))
        verdicts.append(Verdict(name, paired_ratio(a, b) if min(*a, *b) > 0 else None))
    return tuple(verdicts)
