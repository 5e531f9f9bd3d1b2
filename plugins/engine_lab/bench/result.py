"""From the records of a run to its result: plain data, also the JSON file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.contracts.percentiles import Sample, describe
from engine_lab.bench.busy import Busy, as_json
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.slo import Slo

SCHEMA = "engine-bench/1"
MAX_LAG_MS = 5.0
MAX_LAG_SHARE = 0.01

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Objectives of requests."""

    slo: Slo | None
    class_slos: Mapping[str, Slo]
    """By service class, in place of :attr:`slo`."""

    def of(self, record: RequestRecord) -> Slo | None:
        return self.class_slos.get(record.service_class, self.slo)


def summarise(
    records: Sequence[RequestRecord],
    loop_lags_s: Sequence[float],
    slo: Slo | None,
    config: dict[str, Any],
    busy: Busy | None = None,
    *,
    class_slos: Mapping[str, Slo] | None = None,
    slice_s: float | None = None,
    has_schedule: bool = False,
    interrupted: bool = False,
) -> Result:
    """The result of a run. ``config`` says what was run and is copied into it; ``busy``: what was seen of the machine.
    ``class_slos``: by service class, in place of ``slo``; ``slice_s``: figures of every so many seconds, too;
    ``has_schedule``: requests have moments of their own.

    The run lasts from the first due time to the last end, waiting for stragglers included.
    """
    limits = Limits(slo, class_slos or {})
    ok = [record for record in records if record.ok]
    began_s = min((r.scheduled_s for r in records), default=0.0)
    duration_s = max((r.done_s for r in records), default=0.0) - began_s
    metrics = {name: spread(samples) for name, samples in latency_samples(ok).items()}
    client = client_lag(records, loop_lags_s, metrics["ttft_ms"]["p50"], has_schedule)
    reasons = client.pop("reasons")
    return {
        "schema": SCHEMA,
        "config": config,
        "valid": not reasons,
        "invalid_reasons": reasons,
        "interrupted": interrupted,
        "duration_s": duration_s,
        "requests": {
            "sent": len(records),
            "ok": len(ok),
            "failed": failures(records),
            "left": sum(record.left for record in records),
        },
        "metrics": metrics,
        "throughput": throughput(ok, duration_s),
        "tokens": token_counts(ok),
        "drafting": drafting(ok),
        "engines": by_engine(ok),
        "goodput": goodput(records, limits, duration_s),
        "classes": by_class(records, limits, duration_s),
        "slices": slices(records, limits, slice_s, began_s),
        "held_ms": held(records),
        "client": client,
        "machine": as_json(busy),
        "records": [row(record) for record in sorted(records, key=lambda r: (r.index, r.turn))],
    }


def by_class(records: Sequence[RequestRecord], limits: Limits, duration_s: float) -> dict[str, dict[str, Any]] | None:
    """What each class of requests saw, by name; ``None`` where there is but one without a name."""
    found: dict[str, list[RequestRecord]] = {}
    for record in records:
        found.setdefault(record.service_class, []).append(record)
    if not found.keys() - {""}:
        return None
    return {name: part(found[name], limits, duration_s) for name in sorted(found)}


def slices(
    records: Sequence[RequestRecord], limits: Limits, slice_s: float | None, began_s: float
) -> list[dict[str, Any]] | None:
    """What requests saw that were due in each slice of time; those in which none was are left out."""
    if slice_s is None:
        return None
    found: dict[int, list[RequestRecord]] = {}
    for record in records:
        found.setdefault(int((record.scheduled_s - began_s) / slice_s), []).append(record)
    return [{"from_s": which * slice_s, **part(found[which], limits, slice_s)} for which in sorted(found)]


def part(records: Sequence[RequestRecord], limits: Limits, duration_s: float) -> dict[str, Any]:
    """Counts, latencies and goodput of some of the records."""
    ok = [record for record in records if record.ok]
    samples = latency_samples(ok)
    return {
        "requests": len(records),
        "ok": len(ok),
        "left": sum(record.left for record in records),
        "output_tokens": total(record.output_tokens for record in ok),
        **{key: spread(samples[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms")},
        "goodput": goodput(records, limits, duration_s),
    }


def held(records: Sequence[RequestRecord]) -> dict[str, float | int | None] | None:
    """How long a limit of running requests held requests back; ``None``: it held none."""
    times = [(record.held_s * 1e3, 1) for record in records if record.held_s > 1e-3]
    return spread(times) if times else None


def latency_samples(ok: Sequence[RequestRecord]) -> dict[str, list[Sample]]:
    return {
        "ttft_ms": [(value, 1) for r in ok if (value := r.ttft_ms) is not None],
        "itl_ms": [sample for r in ok for sample in r.itl_samples],
        "inter_chunk_ms": [(gap, 1) for r in ok for gap in r.inter_chunk_ms],
        "tpot_ms": [(value, 1) for r in ok if (value := r.tpot_ms) is not None],
        "e2e_ms": [(r.e2e_ms, 1) for r in ok],
    }


def spread(samples: Sequence[Sample]) -> dict[str, float | int | None]:
    """Count, mean, percentiles, least and greatest value."""
    values = [value for value, _ in samples]
    return {**describe(samples), "min": min(values, default=None), "max": max(values, default=None)}


def client_lag(
    records: Sequence[RequestRecord], loop_lags_s: Sequence[float], ttft_p50_ms: float | None, has_schedule: bool
) -> dict[str, Any]:
    """How late the client itself was, and whether that spoils the run: its 99th percentile, of few requests the
    largest value, must not exceed 5 ms or 1 % of the median TTFT, whichever is larger. What follows a schedule must
    not leave later than 5 ms, however slow the server is."""
    limit = max(MAX_LAG_MS, MAX_LAG_SHARE * (ttft_p50_ms or 0.0))
    send_limit = MAX_LAG_MS if has_schedule else limit
    send = spread([(record.late_s * 1e3, 1) for record in records])
    loop = spread([(lag * 1e3, 1) for lag in loop_lags_s])
    reasons = [
        f"{what}: {at_worst(lag)} exceeds {most:.1f} ms; the client was too slow for its measurements to count (lower "
        "the load, or run it on an idle machine)"
        for what, lag, most in (("requests left late", send, send_limit), ("the event loop woke late", loop, limit))
        if (lag["max"] or 0.0 if lag["p99"] is None else lag["p99"]) > most
    ]
    return {
        "limit_ms": limit,
        "send_limit_ms": send_limit,
        "send_lag_ms": send,
        "loop_lag_ms": loop,
        "reasons": reasons,
    }


def at_worst(lag: dict[str, Any]) -> str:
    """P99, or of few the largest value."""
    if lag["p99"] is not None:
        return f"{lag['p99']:.1f} ms at p99"
    return "unknown" if lag["max"] is None else f"{lag['max']:,.1f} ms at most"


def failures(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and the first one's own words."""
    failed = [record for record in records if record.error]
    counts = Counter(record.error for record in failed)
    return {
        kind: {"count": count, "example": next(r.detail for r in failed if r.error == kind)}
        for kind, count in counts.most_common()
    }


def throughput(ok: Sequence[RequestRecord], duration_s: float) -> dict[str, float | None]:
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    output, prompt = total(r.output_tokens for r in ok), total(r.prompt_tokens for r in ok)
    return {
        "requests_per_s": len(ok) * per_s,
        "output_tokens_per_s": None if output is None else output * per_s,
        "prompt_tokens_per_s": None if prompt is None else prompt * per_s,
    }


def token_counts(ok: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Totals, and tokens per chunk; ``None`` where the server does not say."""
    output = total(r.output_tokens for r in ok)
    chunks = sum(len(r.chunks_s) for r in ok)
    return {
        "prompt": total(r.prompt_tokens for r in ok),
        "cached": total(r.cached_tokens for r in ok),
        "output": output,
        "per_chunk": output / chunks if output is not None and chunks else None,
    }


def drafting(ok: Sequence[RequestRecord]) -> dict[str, float | None] | None:
    """Sums over requests and what follows from them; ``None`` where the server does not say."""
    said = [record.drafting for record in ok]
    known = [one for one in said if one is not None]
    if not known or len(known) < len(said):
        return None
    drafted, accepted = sum(one.drafted for one in known), sum(one.accepted for one in known)
    chains, decode_ms = sum(one.chains for one in known), sum(one.decode_ms for one in known)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "chains": chains,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_accepted_length": 1.0 + accepted / chains if chains else None,
        "draft_share": sum(one.draft_ms for one in known) / decode_ms if decode_ms > 0.0 else None,
    }


def by_engine(ok: Sequence[RequestRecord]) -> dict[str, dict[str, Any]] | None:
    """What each engine served, by its id; ``None`` where the server does not say of every request."""
    found: dict[str, list[RequestRecord]] = {}
    for record in ok:
        if record.served is None:
            return None
        found.setdefault(record.served.engine, []).append(record)
    return {
        engine: {
            "requests": len(records),
            "moved_here": sum(record.served is not None and record.served.attempt > 1 for record in records),
            "output_tokens": total(record.output_tokens for record in records),
            "ttft_ms": spread(latency_samples(records)["ttft_ms"]),
        }
        for engine, records in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))
    } or None


def total(counts: Iterable[int | None]) -> int | None:
    """The sum; ``None`` if any is unknown, or there are none: a part is not the whole."""
    known = list(counts)
    return None if not known or None in known else sum(count for count in known if count is not None)


def goodput(records: Sequence[RequestRecord], limits: Limits, duration_s: float) -> dict[str, Any] | None:
    """Requests per second that kept every objective; failed ones are in the share's denominator, those that the client
    left are not. ``None`` where no objective is set."""
    judged = [(slo, r) for r in records if not r.left and (slo := limits.of(r)) is not None]
    if not judged and limits.slo is None and not limits.class_slos:
        return None
    verdicts = [slo.met_by(record) for slo, record in judged]
    good = sum(verdict is True for verdict in verdicts)
    unknown = any(verdict is None for verdict in verdicts)
    names = sorted({str(slo) for slo, _ in judged})
    return {
        "slo": names[0] if len(names) == 1 else "the limits of its class",
        "requests_per_s": None if unknown or duration_s <= 0 else good / duration_s,
        "share": None if unknown or not verdicts else good / len(verdicts),
    }


def row(record: RequestRecord) -> dict[str, Any]:
    return {
        "index": record.index,
        "turn": record.turn,
        "service_class": record.service_class,
        "scheduled_s": record.scheduled_s,
        "sent_s": record.sent_s,
        "ttft_ms": record.ttft_ms,
        "tpot_ms": record.tpot_ms,
        "e2e_ms": record.e2e_ms,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "drafting": None if record.drafting is None else asdict(record.drafting),
        "served": None if record.served is None else asdict(record.served),
        "finish_reason": record.finish_reason,
        "error": record.error,
        "left": record.left,
        "held_s": record.held_s,
    }
