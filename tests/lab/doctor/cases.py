"""Recorded evidence, and figures made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_lab.doctor import evidence
from engine_lab.doctor.evidence import Engine, Evidence, Figures
from engine_lab.doctor.rule import Remedy, Rule

RECORDED = Path(__file__).parent / "recorded"
"""Of real engines, by ``tools/benchmarks/doctor_faults.py``; ``CAUSE.json``, and ``healthy-*.json``. The engine of
``overload.json`` fitted no cost of a row: it is 0 there. ``breakpoint_moves.json`` and ``long_prompt_among_short.json``
were recorded beside other processes: figures of the machine are left out."""


def recorded(name: str) -> Evidence:
    return evidence.read(str(RECORDED / f"{name}.json"))


def engine(slots: dict[str, str] | None = None, **settings: Any) -> Engine:
    """A default engine on a CPU; settings with ``__`` for dots."""
    usual = {
        "quantizer": "checkpoint",
        "kv_format": "native",
        "kv_allocator": "prefix_cache",
        "drafter": "none",
        "scheduler": "chunked_prefill",
    }
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return Engine(
        model="bundled",
        path="bundled",
        device="CPU",
        kind="cpu",
        execution="compile",
        overlap=True,
        slots=usual | (slots or {}),
        settings={"scheduler.max_requests": 32, "scheduler.token_budget": 2048} | named,
        max_len=4096,
        kv_tokens=65536,
        weights_bytes=1,
    )


def slow(limit_ms: float = 100.0, saves: float = 0.5, metric: str = "ttft_p50_ms", cause: str = "slow") -> Rule:
    """A rule about nothing but its metric."""

    def look(engine: Engine, figures: Figures) -> Remedy | None:
        return Remedy(1 - saves, 0.9, ("overlap=true",), "Be quicker.") if figures[metric] > limit_ms else None

    return Rule(cause, "a branch", "It is slow.", metric, (metric,), look, {"requests": 3.0})


def windows(*ttfts_ms: float, requests: float = 10.0) -> Evidence:
    made = [{"seconds": 1.0, "requests": requests, "ttft_p50_ms": ttft} for ttft in ttfts_ms]
    return Evidence(engine(), made)
