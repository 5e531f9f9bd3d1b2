"""The figures of one run, and which of them sets are ordered by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from engine.contracts.percentiles import describe
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.result import summarise
from engine_lab.bench.slo import Slo

PERCENTILE = 95
"""Of requests: that an SLO is for."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run, as clients see it."""

    key: str
    label: str
    unit: str
    definition: str
    is_larger_better: bool = False

    def worse(self, value: float) -> float:
        """The figure so that less is better."""
        return 1.0 / value if self.is_larger_better else value


FIGURES = (
    Figure("e2e", "E2E mean", "ms", "due until the last token, mean over requests"),
    Figure("ttft_p95", "TTFT P95", "ms", "due until the first output text"),
    Figure("itl_p95", "ITL P95", "ms", "between tokens, over all tokens of the run"),
    Figure("tokens_per_s", "output", "tok/s", "output tokens a second", True),
    Figure(
        "slo",
        "SLO share",
        "x limit",
        f"P{PERCENTILE} over requests of the largest share that any limit of --slo is taken: at most 1 is within it",
    ),
)
BY_KEY = {figure.key: figure for figure in FIGURES}


def figures_of(records: Sequence[RequestRecord], lags_s: Sequence[float], slo: Slo | None) -> dict[str, float | None]:
    """Of a run without failed requests; ``None`` for what the server does not say, or needs more requests."""
    found = summarise(records, lags_s, slo, {})
    metrics = found["metrics"]
    return {
        "e2e": metrics["e2e_ms"]["mean"],
        "ttft_p50": metrics["ttft_ms"]["p50"],
        "ttft_p95": metrics["ttft_ms"]["p95"],
        "itl_p50": metrics["itl_ms"]["p50"],
        "itl_p95": metrics["itl_ms"]["p95"],
        "e2e_p95": metrics["e2e_ms"]["p95"],
        "tokens_per_s": found["throughput"]["output_tokens_per_s"],
        "requests_per_s": found["throughput"]["requests_per_s"],
        "slo": None if slo is None else share_of(slo, records),
        "good": None if slo is None else found["goodput"]["share"],
    }


def share_of(slo: Slo, records: Sequence[RequestRecord]) -> float | None:
    """The P95 over requests of how much of its limits a request takes, by the limit that it takes most of: at most 1
    where so many keep the SLO. ``None`` with too few requests for a P95, or none with any of its values."""
    taken = []
    for record in records:
        values = [(record.slo_value(name), limit) for name, limit in slo.limits_ms] if record.ok else [(inf, 1.0)]
        known = [value / limit for value, limit in values if value is not None]
        if known:
            taken.append((max(known), 1))
    return describe(taken)[f"p{PERCENTILE}"]
