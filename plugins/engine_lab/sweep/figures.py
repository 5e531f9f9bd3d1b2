"""The figures of one run, and which of them sets are ordered by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from engine.contracts.percentiles import describe
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.result import Limits, summarise
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
        f"P{PERCENTILE} over requests of the largest share that any limit is taken, in the class that takes most: at "
        "most 1 is within it",
    ),
)
BY_KEY = {figure.key: figure for figure in FIGURES}
OF_CLASS = "slo of "
"""Begins the key of what is taken of a class's own limits."""


def figure_of(key: str) -> Figure:
    """By its key, that of a class too."""
    name = key.removeprefix(OF_CLASS)
    return BY_KEY.get(key) or Figure(key, f"SLO share of {name}", "x limit", "as SLO share, of this class alone")


def keys_of(figures: Iterable[str]) -> list[str]:
    """Of what sets are compared by: the figures of all requests, then those of classes."""
    return [*BY_KEY, *sorted({key for key in figures if key.startswith(OF_CLASS)})]


def figures_of(
    records: Sequence[RequestRecord], lags_s: Sequence[float], slo: Slo | None, class_slos: Mapping[str, Slo]
) -> dict[str, float | None]:
    """Of a run without failed requests; ``None`` for what the server does not say, or needs more requests.
    ``class_slos``: by class, in place of ``slo``."""
    limits = Limits(slo, class_slos)
    found = summarise(records, lags_s, slo, {}, class_slos=class_slos)
    metrics = found["metrics"]
    shares = shares_of(limits, records)
    return {
        "e2e": metrics["e2e_ms"]["mean"],
        "ttft_p50": metrics["ttft_ms"]["p50"],
        "ttft_p95": metrics["ttft_ms"]["p95"],
        "itl_p50": metrics["itl_ms"]["p50"],
        "itl_p95": metrics["itl_ms"]["p95"],
        "e2e_p95": metrics["e2e_ms"]["p95"],
        "tokens_per_s": found["throughput"]["output_tokens_per_s"],
        "requests_per_s": found["throughput"]["requests_per_s"],
        "slo": max((one for one in shares.values() if one is not None), default=None),
        "good": None if found["goodput"] is None else found["goodput"]["share"],
        **{f"{OF_CLASS}{name}": share for name, share in shares.items() if name},
    }


def shares_of(limits: Limits, records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """By class that has limits, the P95 over requests of how much of its limits a request takes, by the limit that it
    takes most of: at most 1 where so many keep the SLO. With too few requests for a P95, the worst one; ``None``
    without any that has one of its values."""
    taken: dict[str, list[float]] = {}
    for record in records:
        slo = limits.of(record)
        if slo is None or record.left:
            continue
        values = [(record.slo_value(name), limit) for name, limit in slo.limits_ms] if record.ok else [(inf, 1.0)]
        known = [value / limit for value, limit in values if value is not None]
        taken.setdefault(record.service_class, []).extend([max(known)] if known else [])
    return {name: _share(found) for name, found in taken.items()}


def _share(taken: Sequence[float]) -> float | None:
    found = describe([(share, 1) for share in taken])[f"p{PERCENTILE}"]
    return max(taken, default=None) if found is None else found
