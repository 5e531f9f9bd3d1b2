"""What a server says of its engines at a moment: declarations, and readings of them. Definitions: ``docs/metrics.md``.

A figure that is not known has no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.contracts.counters import Metric, Reading

STATE = Metric("gauge", "engine_state", "1", "1 for the state that the engine is in.", "state")
STARTS = Metric("counter", "engine_starts_total", "starts", "Times that the engine has become ready.")
DESIRED = Metric("gauge", "engine_fleet_desired", "engines", "Engines that should be up, of the whole server.")
SEQUENCES = Metric("gauge", "engine_sequences", "sequences", "Sent to the engine and not ended.")
TOKENS = Metric("gauge", "engine_tokens_in_flight", "tokens", "Tokens of these, by what they wait for.", "kind")
PREFILL_SPEED = Metric(
    "gauge", "engine_prefill_tokens_per_second", "tokens/s", "Prompt tokens a second, by the measured cost of steps."
)
BACKLOG = Metric("gauge", "engine_backlog_seconds", "s", "How long the engine computes on the queued tokens.")
SATURATION = Metric(
    "gauge", "engine_saturation_ratio", "1", "Rows or KV blocks in use, whichever is more; 1: more waits."
)
KV_TOKENS = Metric("gauge", "engine_kv_pool_tokens", "tokens", "Tokens that the engine's KV pool holds.")
SIGNAL_AGE = Metric("gauge", "engine_signal_age_seconds", "s", "Since the engine last said anything.")
EXPECTED_TTFT = Metric(
    "gauge", "engine_expected_ttft_p95_seconds", "s", "P95 of TTFT as predicted, last five minutes.", "class"
)
OBSERVED_TTFT = Metric(
    "gauge", "engine_observed_ttft_p95_seconds", "s", "P95 of TTFT as observed, last five minutes.", "class"
)
STORE_RECORDS = Metric("gauge", "engine_kv_store_records", "records", "Records that a KV store has.", "store")
STORE_BYTES = Metric("gauge", "engine_kv_store_bytes", "bytes", "What they take.", "store")
STORE_BOUND = Metric("gauge", "engine_kv_store_bound_bytes", "bytes", "What they may take.", "store")
STORE_EVICTED = Metric("counter", "engine_kv_store_evicted_total", "records", "Records that made way.", "store")
STORE_FAULTS = Metric(
    "counter", "engine_kv_store_faults_total", "records", "Records damaged or gone, reads and writes failed.", "store"
)
STORE_LOADS = Metric("counter", "engine_kv_store_loads_total", "requests", "Requests with tokens from it.", "store")
STORE_LOADED = Metric("counter", "engine_kv_store_loaded_tokens_total", "tokens", "These tokens.", "store")
STORE_LOADED_BYTES = Metric("counter", "engine_kv_store_loaded_bytes_total", "bytes", "Bytes read for them.", "store")
STORE_STORED_BYTES = Metric("counter", "engine_kv_store_stored_bytes_total", "bytes", "Bytes that it took.", "store")
STORE_LOAD_SECONDS = Metric(
    "counter", "engine_kv_store_load_seconds_total", "s", "Time that requests waited for it.", "store"
)
STORE_SAVED_SECONDS = Metric(
    "gauge", "engine_kv_store_saved_seconds", "s", "Computing the loaded tokens, less waiting for them.", "store"
)
STORE_SKIPPED = Metric(
    "counter", "engine_kv_store_skipped_total", "requests", "Requests that computed what a store has.", "reason"
)
METRICS = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric))
STATES = ("starting", "ready", "draining", "stopped", "down")


def readings(values: Mapping[Metric, float | Mapping[str, float | None] | None], engine: str) -> list[Reading]:
    """``values``: of metrics without a label, or of each value of the label; ``None``: not known."""
    return [
        Reading(metric.name, metric.kind, metric.unit, metric.help, metric.label, dict(_known(found)), engine=engine)
        for metric, found in values.items()
    ]


def one_of(states: Sequence[str], state: str) -> dict[str, float | None]:
    """1 for one of the values of a label, 0 for the others."""
    return {each: float(each == state) for each in states}


def _known(found: float | Mapping[str, float | None] | None) -> Iterator[tuple[str, float]]:
    for value, amount in (found if isinstance(found, Mapping) else {"": found}).items():
        if amount is not None:
            yield value, float(amount)
