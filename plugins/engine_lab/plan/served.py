"""The load that a running server has had: its latest requests, as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from statistics import fmean
from typing import Any

from engine_lab.plan.workload import BLOCK
from engine_lab.shared.simulation.trace import Measured, TraceRequest

MOST = 1000
"""Requests that are asked for."""
FAR = 1.5
"""A load whose rate or lengths are so many times those assumed, or so many times less, is another one."""
RECEIVING = ("receive", "route")


def requests_of(answered: Iterable[Mapping[str, Any]]) -> list[TraceRequest]:
    """Of what ``/engine/requests`` answers, those that ended well, in the order in which they came."""
    ended = [each for each in answered if each["output_tokens"] and each["finish_reason"] in ("stop", "length")]
    began = {id(each): -each["ended_s_ago"] - each["total_ms"] / 1e3 for each in ended}
    ended.sort(key=lambda each: began[id(each)])
    first, names = min(began.values(), default=0.0), count(1 << 40)
    return [_request(each, began[id(each)] - first, names) for each in ended]


def _request(answered: Mapping[str, Any], arrival_s: float, names: Iterator[int]) -> TraceRequest:
    """What was cached counts as the beginning of all others: which requests shared it is not known."""
    prompt, shared = answered["prompt_tokens"], answered["cached_tokens"] // BLOCK
    hashes = (*range(shared), *(next(names) for _ in range(-(-prompt // BLOCK) - shared))) if shared else ()
    spans = answered["spans"]
    measured = Measured(
        ttft_ms=answered["ttft_ms"],
        e2e_ms=answered["total_ms"],
        receive_ms=sum(spans.get(name, 0.0) for name in RECEIVING),
        cached_tokens=answered["cached_tokens"],
        **{f"{name}_ms": spans.get(name, 0.0) for name in ("tokenize", "dispatch", "queue", "prefill")},
    )
    return TraceRequest(arrival_s, prompt, answered["output_tokens"], hashes, BLOCK, measured=measured)


def otherwise(assumed: Sequence[TraceRequest], served: Sequence[TraceRequest]) -> str:
    """How the load that was served differs from the one assumed; empty: not by much, or too little is known."""
    if len(served) < 2 or len(assumed) < 2:
        return ""
    told = []
    for name, of in (("requests/s", _rate), ("prompt tokens", _prompt), ("output tokens", _output)):
        before, now = of(assumed), of(served)
        if before and now and not 1.0 / FAR <= now / before <= FAR:
            told.append(f"{now:,.1f} {name} instead of {before:,.1f}")
    return ", ".join(told)


def _rate(requests: Sequence[TraceRequest]) -> float:
    lasted_s = max(request.arrival_s for request in requests) - min(request.arrival_s for request in requests)
    return (len(requests) - 1) / lasted_s if lasted_s else 0.0


def _prompt(requests: Sequence[TraceRequest]) -> float:
    return fmean(request.prompt_tokens for request in requests)


def _output(requests: Sequence[TraceRequest]) -> float:
    return fmean(request.output_tokens for request in requests)
