"""The figures of one run, and how two runs' are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine.contracts.percentiles import FEWEST, describe
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.result import summarise
from engine_lab.bench.slo import Slo
from engine_lab.ladder.record import Run


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run."""

    key: str
    label: str
    definition: str
    is_ratio: bool = True
    """Compared by ratio, smaller is better; otherwise by difference, larger is better."""


FIGURES = (
    Figure("output_p50", "first output P50", "due until the client has the first text (ms)"),
    Figure("ttft_p50", "TTFT P50", "E2E less decoding: due until the first token, streamed or not (ms)"),
    Figure("ttft_p95", "TTFT P95", f"its 95th percentile, where a run has {FEWEST[95]} requests (ms)"),
    Figure("itl", "ITL", "decoding, divided by the tokens it brought, over all requests of the run (ms)"),
    Figure("e2e_p50", "E2E P50", "due until the last token (ms)"),
    Figure(
        "goodput",
        "goodput gain",
        "after - before of the share of requests, failed ones included, that kept every limit of --slo",
        False,
    ),
)


def run_of(records: Sequence[RequestRecord], lags_s: Sequence[float], slo: Slo | None) -> Run:
    """What is kept of a run. Failed requests count in ``failed`` and ``goodput`` alone."""
    result = summarise(records, lags_s, slo, {})
    ok = [record for record in records if record.ok]
    goodput, tokens = result["goodput"], result["tokens"]
    first, p95 = ttft_ms(ok)
    figures = {
        "output_p50": result["metrics"]["ttft_ms"]["p50"],
        "ttft_p50": first,
        "ttft_p95": p95,
        "itl": itl_ms(ok),
        "e2e_p50": result["metrics"]["e2e_ms"]["p50"],
        "goodput": None if goodput is None else goodput["share"],
    }
    return Run(
        figures,
        len(records),
        len(records) - len(ok),
        tokens["prompt"],
        tokens["cached"],
        tokens["output"],
        (result["drafting"] or {}).get("acceptance_rate"),
        result["client"]["loop_lag_ms"]["p99"],
        new_tokens(ok),
    )


def new_tokens(ok: Sequence[RequestRecord]) -> float | None:
    """Median of the prompt tokens that were not cached; ``None`` where the server does not say."""
    known = [
        r.prompt_tokens - r.cached_tokens for r in ok if r.prompt_tokens is not None and r.cached_tokens is not None
    ]
    return median(known) if known else None


def ttft_ms(ok: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """P50 and P95 of E2E less the decoding that the server reports; ``None`` where it reports none."""
    known = [(record.e2e_ms - record.drafting.decode_ms, 1) for record in ok if record.drafting is not None]
    if not known or len(known) < len(ok):
        return None, None
    found = describe(known)
    return found["p50"], found["p95"]


def itl_ms(ok: Sequence[RequestRecord]) -> float | None:
    """Mean per token; ``None`` where no request brought two, or the server does not say."""
    if any(record.drafting is None or record.output_tokens is None for record in ok):
        return None
    decode_ms = sum(record.drafting.decode_ms for record in ok if record.drafting is not None)
    tokens = sum(max(0, (record.output_tokens or 0) - 1) for record in ok)
    return decode_ms / tokens if tokens else None
