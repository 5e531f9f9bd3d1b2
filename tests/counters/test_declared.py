"""A metric is named in its declaration alone, and what cannot read declarations names no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from engine.counters import declared, fleet, gateway

ROOT = Path(__file__).parents[2]
METRICS = (*declared.METRICS, *fleet.METRICS, *gateway.METRICS)
NAMES = [metric.name for metric in METRICS]
NAMED = re.compile(rf"\b(?:{'|'.join(NAMES)})(?:_sum|_count|_bucket)?\b")


def test_no_metric_is_declared_twice() -> None:
    assert len(NAMES) == len(set(NAMES)) and all(name.startswith("engine_") for name in NAMES)


def test_a_counter_is_a_total_and_a_time_is_in_seconds() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert ("_seconds" in metric.name) == (metric.unit == "s"), metric.name


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string that is not a docstring."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_no_other_file_spells_a_metric() -> None:
    files = [path for folder in ("core", "plugins", "tools") for path in (ROOT / folder).rglob("*.py")]
    sources = {path: text for path in files if "engine_" in (text := path.read_text("utf-8"))}
    spelled = {
        path.relative_to(ROOT).as_posix()
        for path, source in sources.items()
        if any("engine_" in text and NAMED.search(text) for text in strings(ast.parse(source)))
    }
    assert spelled == {f"core/engine/counters/{name}.py" for name in ("declared", "fleet", "gateway")}


def test_the_documentation_has_each_metric_once_with_its_type_and_label() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(engine_\w+)` \| (\w+) \|(?:[^\n]*by `(\w+)`)?", page, re.MULTILINE)
    assert sorted(rows) == sorted((metric.name, metric.kind, metric.label) for metric in METRICS)
