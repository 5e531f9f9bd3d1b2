"""The rules as a file for Prometheus (``rule_files``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from engine_lab.alerts.rules import Rule


def rules_file(table: Iterable[Rule]) -> str:
    groups = [{"name": "engine", "rules": [_entry(rule) for rule in table]}]
    text: str = yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000)
    return text


def _entry(rule: Rule) -> dict[str, Any]:
    return {
        "alert": rule.name,
        "expr": rule.promql,
        "for": rule.lasting,
        "labels": {"severity": rule.severity, **rule.labels},
        "annotations": {"summary": rule.summary, "description": rule.advice, "value": "{{ $value }}"},
    }
