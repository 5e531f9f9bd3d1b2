"""Classes of service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; each is the bound of a bucket."""

    ttft_s: float
    itl_s: float


SLO_CLASSES = {"chat": Slo(0.5, 0.05), "code": Slo(0.1, 0.03), "batch": Slo(30.0, 1.0)}
