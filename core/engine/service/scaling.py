"""What says whether there are too many engines or too few: figures of each, and of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.contracts.counters import Metric, Reading
from engine.contracts.percentiles import describe
from engine.counters import declared
from engine.counters import fleet as gauges
from engine.loop.messages import StoreState
from engine.service.autoscale import Figures
from engine.service.engines import EngineHandle
from engine.service.prefill_time import prefill_tokens_per_s
from engine.service.promises import DEFAULT_CLASS

Condition = Literal["starting", "ready", "draining", "stopped", "down"]
"""``stopped``: on purpose; ``down``: it hangs, is dead or was given up."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Of one engine at a moment."""

    id: str
    state: Condition
    pid: int | None
    host: str | None
    """As :attr:`engine.service.engines.EngineHandle.host`."""
    starts: int
    sequences: int
    """Sent there and not ended, as the server counts them."""
    queued_tokens: int
    """Prompt tokens of those without a token, cached ones left out."""
    running_tokens: int
    """Prompt and output tokens of the others."""
    tokens_per_s: float | None
    """Prompt tokens that it computes a second, by the measured cost of its steps; ``None``: none was measured."""
    backlog_s: float | None
    """How long it computes on the queued tokens; ``None``: not known."""
    saturation: float
    """0..1: ``sequences`` of its rows, or KV blocks in use, whichever is more; 1: more waits."""
    cached_blocks: int
    age_s: float | None
    """Since it last said anything; ``None``: it is stopped."""


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Of one class of requests, in the last minutes."""

    expected_ttft_p95_s: float | None
    """Of what was expected of each when it was sent to its engine; ``None``: too few."""
    observed_ttft_p95_s: float | None
    shed: int
    """Refused with 429 since the server began."""


def condition(engine: EngineHandle) -> Condition:
    match engine.state:
        case "stopped":
            return "stopped"
        case "loading" | "restarting":
            return "starting"
        case "ready" if engine.supervisor.not_ready() is None:
            return "draining" if engine.draining else "ready"
    return "down"


def engine_figures(engine: EngineHandle) -> EngineFigures:
    load, scheduler = engine.load, engine.plan.scheduler
    rows = load.sequences / scheduler.max_requests
    return EngineFigures(
        engine.id,
        condition(engine),
        engine.pid,
        engine.host,
        engine.supervisor.starts,
        load.sequences,
        load.queued_tokens,
        load.running_tokens,
        prefill_tokens_per_s(engine.cost, scheduler.token_budget),
        engine.prefill_s(load.queued_tokens),
        min(1.0, max(rows, engine.client.stats.kv_used)),
        engine.cached_blocks,
        None if engine.state == "stopped" else engine.supervisor.silent_s,
    )


def fleet_figures(engines: Iterable[EngineHandle], at_s: float, held: int) -> Figures:
    """``held``: requests that wait for an engine to start."""
    found = [engine_figures(engine) for engine in engines]
    ready = [each for each in found if each.state == "ready"]
    backlogs = [each.backlog_s for each in ready if each.backlog_s is not None]
    return Figures(
        at_s,
        sum(each.state != "stopped" for each in found),
        sum(each.sequences for each in found),
        held,
        sum(backlogs) / len(backlogs) if backlogs else None,
        sum(each.saturation for each in ready) / len(ready) if ready else 0.0,
    )


def class_figures(engines: Sequence[EngineHandle]) -> Mapping[str, ClassFigures]:
    """By class, of several engines together. Call on the thread of the event bus."""
    names = tuple(engines[0].plan.settings.slo.classes) or (DEFAULT_CLASS,)
    return {name: _class_figures(engines, name) for name in names}


def _class_figures(engines: Sequence[EngineHandle], name: str) -> ClassFigures:
    samples = [engine.latency.of_class(name) for engine in engines]

    def p95_s(which: str) -> float | None:
        p95_ms = describe([sample for each in samples for sample in each[which]])["p95"]
        return None if p95_ms is None else p95_ms / 1e3

    has_classes = bool(engines[0].plan.settings.slo.classes)
    metric, value = (declared.SLO_REFUSED, name) if has_classes else (declared.REJECTED, "429")
    shed = sum(engine.counters.value(metric, value) for engine in engines)
    return ClassFigures(p95_s("expected"), p95_s("observed"), int(shed))


def engine_readings(engine: EngineHandle, desired: int | None = None) -> list[Reading]:
    """The gauges of an engine. ``desired``: engines that should be up, said with the first one alone. Call on the
    thread of the event bus."""
    found, info = engine_figures(engine), engine.client.info
    classes = class_figures([engine])
    values: dict[Metric, float | Mapping[str, float | None] | None] = {
        gauges.STATE: gauges.one_of(gauges.STATES, found.state),
        gauges.STARTS: found.starts,
        gauges.SEQUENCES: found.sequences,
        gauges.TOKENS: {"queued": found.queued_tokens, "running": found.running_tokens},
        gauges.PREFILL_SPEED: found.tokens_per_s,
        gauges.BACKLOG: found.backlog_s,
        gauges.SATURATION: found.saturation,
        gauges.KV_TOKENS: None if info is None else info.kv_tokens,
        gauges.SIGNAL_AGE: found.age_s,
        gauges.EXPECTED_TTFT: {name: each.expected_ttft_p95_s for name, each in classes.items()},
        gauges.OBSERVED_TTFT: {name: each.observed_ttft_p95_s for name, each in classes.items()},
    }
    if stores := engine.client.stats.stores:
        values.update(_of_stores(stores))
    if desired is not None:
        values[gauges.DESIRED] = desired
    return gauges.readings(values, engine.id)


OF_STORES = {
    gauges.STORE_RECORDS: "records",
    gauges.STORE_BYTES: "num_bytes",
    gauges.STORE_BOUND: "most_bytes",
    gauges.STORE_EVICTED: "evicted",
    gauges.STORE_FAULTS: "faults",
    gauges.STORE_LOADS: "loads",
    gauges.STORE_LOADED: "loaded_tokens",
    gauges.STORE_LOADED_BYTES: "loaded_bytes",
    gauges.STORE_STORED_BYTES: "stored_bytes",
    gauges.STORE_LOAD_SECONDS: "load_s",
    gauges.STORE_SAVED_SECONDS: "saved_s",
}
"""Fields of a :class:`~engine.loop.messages.StoreState`."""


def _of_stores(stores: Sequence[StoreState]) -> dict[Metric, Mapping[str, float]]:
    values: dict[Metric, Mapping[str, float]] = {
        metric: {store.name: getattr(store, name) for store in stores} for metric, name in OF_STORES.items()
    }
    skipped = {name: sum(store.skipped[name] for store in stores) for name in stores[0].skipped}
    values[gauges.STORE_SKIPPED] = skipped
    return values
