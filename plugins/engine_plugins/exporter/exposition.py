"""The Prometheus text exposition format (version 0.0.4), as far as an engine needs it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from engine.contracts.counters import Metric, Reading


def page(readings: Iterable[Reading], labels: Mapping[str, str], names_engine: bool = False) -> str:
    """All readings, those of one name together. Each line has the ``labels`` and its own, and ``engine`` where it
    ``names_engine``."""
    constant = ",".join(label(name, value) for name, value in labels.items())
    by_name: dict[str, list[Reading]] = {}
    for reading in readings:
        by_name.setdefault(reading.name, []).append(reading)
    lines: list[str] = []
    for name, same in by_name.items():
        lines += [f"# HELP {name} {escape(same[0].help)}", f"# TYPE {name} {same[0].kind}"]
        for reading in same:
            of_engine = label("engine", reading.engine) if names_engine else ""
            lines += _lines(reading, ",".join(filter(None, (constant, of_engine))))
    return "".join(f"{line}\n" for line in lines)


def info(metric: Metric, found: Iterable[Mapping[str, str]]) -> str:
    """A gauge that is 1, with what it has to say in its labels; empty where nothing is said."""
    lines = [f"{metric.name}{braces(*(label(*each) for each in labels.items()))} 1.0\n" for labels in found]
    head = f"# HELP {metric.name} {escape(metric.help)}\n# TYPE {metric.name} {metric.kind}\n"
    return head + "".join(lines) if lines else ""


def counted(metric: Metric, amount: float) -> Reading:
    """A reading of a counter without labels that is kept elsewhere."""
    return Reading(metric.name, metric.kind, metric.unit, metric.help, values={"": amount})


def _lines(reading: Reading, labels: str) -> Iterator[str]:
    name = reading.name
    if reading.kind != "histogram":
        for value, amount in reading.values.items():
            own = label(reading.label, value) if reading.label else ""
            yield f"{name}{braces(labels, own)} {number(amount)}"
        return
    below = 0
    for bound, count in zip((*reading.bounds, math.inf), reading.counts, strict=True):
        below += count
        yield f"{name}_bucket{braces(labels, label('le', number(bound)))} {below}"
    yield f"{name}_sum{braces(labels)} {number(reading.sum)}"
    yield f"{name}_count{braces(labels)} {below}"


def label(name: str, value: str) -> str:
    return f'{name}="{escape(value)}"'


def braces(*labels: str) -> str:
    inside = ",".join(label for label in labels if label)
    return f"{{{inside}}}" if inside else ""


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    """A sample value: integers without exponent, so that large counters stay exact."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) + ".0" if value == int(value) and abs(value) < 2**53 else repr(value)
