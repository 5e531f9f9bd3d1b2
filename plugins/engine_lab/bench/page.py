"""The result as one page."""

from __future__ import annotations

from engine_lab.bench.report import Result


def page(result: Result) -> str:
    return ""
