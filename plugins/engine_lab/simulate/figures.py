"""From an outcome to the figures that are shown. All of them are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contracts.percentiles import describe
from engine.loop.messages import StoreState
from engine_lab.bench.slo import Slo
from engine_lab.shared.simulation.outcome import Outcome, SimulatedRequest
from engine_lab.shared.simulation.trace import TraceRequest

SOURCE = "simulated"
COMPONENTS = ("api", "dispatch", "queue", "prefill", "deliver")
"""Of TTFT."""


OF_API = ("api", "deliver")
"""Of these components, what takes place in the API process."""


def figures(outcome: Outcome, slo: Slo | None, knows_api: bool = True) -> dict[str, Any]:
    """``knows_api``: how long the API process takes is part of the outcome; else those components are ``None``."""
    served = [request for request in outcome.requests if not request.error]
    tokens = sum(request.output_tokens for request in served)
    prompts = sum(request.prompt_tokens for request in served)
    found: dict[str, Any] = {
        "source": SOURCE,
        "requests": len(outcome.requests),
        "refused": len(outcome.requests) - len(served),
        "duration_s": outcome.duration_s,
        "output_tokens_per_s": tokens / outcome.duration_s if outcome.duration_s else 0.0,
        "cached_share": sum(request.cached_tokens for request in served) / prompts if prompts else 0.0,
        "prompt_tokens": {"all": prompts, **_sources(served, outcome.stores)},
        "ttft_ms": describe([(request.ttft_ms, 1) for request in served]),
        "itl_ms": describe([(us / 1e3, count) for us, count in outcome.itl_us]),
        "e2e_ms": describe([(request.e2e_ms, 1) for request in served]),
        "ttft_parts_ms": {
            name: None if name in OF_API and not knows_api else _mean([getattr(r, f"{name}_ms") for r in served])
            for name in COMPONENTS
        },
        "drafts": _drafts(served),
        "preemptions": sum(request.preemptions for request in served),
        "engines": [
            {
                "steps": steps.num_steps,
                "busy": steps.busy_ms / 1e3 / outcome.duration_s if outcome.duration_s else 0.0,
                "gap": steps.gap_ms / 1e3 / outcome.duration_s if outcome.duration_s else 0.0,
                "most_running": steps.most_running,
                "most_waiting": steps.most_waiting,
                "most_kv_used": steps.most_kv_used,
            }
            for steps in outcome.steps
        ],
    }
    if outcome.requests and outcome.requests[0].slo_class:
        found["classes"] = _classes(outcome.requests)
    if any(outcome.stores):
        found["stores"] = {states[0].name: _store(states, served) for states in zip(*outcome.stores, strict=True)}
    if slo is not None:
        good = sum(keeps(slo, request) for request in outcome.requests)
        found["slo"] = str(slo)
        found["good"] = good
        found["goodput_per_s"] = good / outcome.duration_s if outcome.duration_s else 0.0
    return found


def measured_figures(trace: Sequence[TraceRequest]) -> dict[str, Any] | None:
    """The same of the requests of a trace, as far as it says what was measured; ``None``: it does not."""
    found = [(request, request.measured) for request in trace if request.measured is not None]
    if not found or len(found) < len(trace):
        return None
    of_all = [measured for _, measured in found]
    decode_ms, gaps = sum(m.e2e_ms - m.ttft_ms for m in of_all), sum(r.output_tokens - 1 for r in trace)
    prompts, tokens = sum(r.prompt_tokens for r in trace), sum(r.output_tokens for r in trace)
    ended_s = max(request.arrival_s + measured.e2e_ms / 1e3 for request, measured in found)
    parts = {
        "api": _mean([m.receive_ms + m.tokenize_ms for m in of_all]),
        **{name: _mean([getattr(m, f"{name}_ms") for m in of_all]) for name in COMPONENTS[1:]},
    }
    return {
        "requests": len(trace),
        "output_tokens_per_s": tokens / ended_s if ended_s else 0.0,
        "cached_share": sum(m.cached_tokens for m in of_all) / prompts,
        "ttft_ms": describe([(m.ttft_ms, 1) for m in of_all]),
        "itl_ms": {**describe([]), "count": gaps, "mean": decode_ms / gaps if gaps else None},
        "e2e_ms": describe([(m.e2e_ms, 1) for m in of_all]),
        "ttft_parts_ms": parts,
        "drafts": {
            "drafted": sum(m.drafted_tokens for m in of_all),
            "accepted": sum(m.accepted_tokens for m in of_all),
        },
    }


def _drafts(served: Sequence[SimulatedRequest]) -> dict[str, int]:
    return {"drafted": sum(r.drafted for r in served), "accepted": sum(r.accepted for r in served)}


def _sources(served: Sequence[SimulatedRequest], stores: Sequence[Sequence[StoreState]]) -> dict[str, int]:
    """Where prompt tokens came from."""
    cached = sum(request.cached_tokens for request in served)
    computed = sum(request.prompt_tokens for request in served) - cached
    loaded = {store.name: sum(request.loaded.get(store.name, 0) for request in served) for store in stores[0]}
    return {"computed": computed, "pool": cached - sum(loaded.values()), **loaded}


def _store(states: Sequence[StoreState], served: Sequence[SimulatedRequest]) -> dict[str, int]:
    """A KV store of all engines."""
    loads = sum(states[0].name in request.loaded for request in served)
    counts = {name: sum(getattr(state, name) for state in states) for name in ("records", "num_bytes", "evicted")}
    return {"loads": loads, **counts}


def _classes(requests: Sequence[SimulatedRequest]) -> dict[str, dict[str, int]]:
    """How many requests each class has, and how many of them had their first token in time."""
    found: dict[str, dict[str, int]] = {}
    for request in requests:
        counts = found.setdefault(request.slo_class, {"requests": 0, "in_time": 0})
        counts["requests"] += 1
        counts["in_time"] += not request.error and request.ttft_ms <= request.ttft_target_ms
    return found


def keeps(slo: Slo, request: SimulatedRequest) -> bool:
    """Whether a request keeps all limits; of ``itl`` and ``tpot`` its mean counts. A refused one does not."""
    values = {
        "ttft": request.ttft_ms,
        "itl": request.itl_ms,
        "tpot": request.itl_ms,
        "e2e": request.e2e_ms,
    }
    return not request.error and all(values[name] <= limit for name, limit in slo.limits_ms)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
