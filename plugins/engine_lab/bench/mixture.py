"""A workload file: classes of requests that come mixed. TOML, a table for each class.

[chat]
share = 4                               # of requests, beside the other classes' (1)
prompt_tokens = "lognormal:200,0.6"     # all other keys are flags of engine bench, whose values they replace
output_tokens = 64
shared_prefix = 0.5
turns = "uniform:1,6"
think = 2.0
slo = "ttft=500ms,itl=50ms"

[batch]
concurrency = 2                         # or rate: a load of its own, beside the one that the flags set
prompt_tokens = 2000
leave = "0.1@5"
"""

from __future__ import annotations

import difflib
import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_lab.bench.distribution import parse_distribution
from engine_lab.bench.slo import Slo, parse_slo
from engine_lab.bench.workload import BenchRequest, Workload, parse_leave


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """What a class has of its own."""

    name: str
    share: float
    changes: dict[str, Any]
    """Fields of :class:`Workload`."""
    slo: Slo | None
    concurrency: int | None = None
    """Of a closed loop of its own."""
    rate: float | None = None
    """Per second, of an open loop of its own."""

    @property
    def has_load(self) -> bool:
        """Whether its requests come beside those of all other classes."""
        return self.concurrency is not None or self.rate is not None

    def workload(self, base: Workload) -> Workload:
        return replace(base, **self.changes, service_class=self.name)


def read_mixture(path: str) -> tuple[ServiceClass, ...]:
    """Raises ``ValueError`` that names file, class and key."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--workload {path}: expected TOML with a table for each class ({error})") from error
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"--workload {path}: expected a table for each class, as in [chat]")
    return tuple(_class(f"--workload {path}, [{name}]", name, table) for name, table in tables.items())


def _class(where: str, name: str, table: dict[str, Any]) -> ServiceClass:
    changes: dict[str, Any] = {}
    own: dict[str, Any] = {"share": 1.0, "slo": None}
    for key, value in table.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise ValueError(f"{where}: no key {key}; {f'did you mean {near[0]}' if near else ', '.join(KEYS)}")
        field, parse = KEYS[key]
        try:
            (changes if field else own)[field or key] = parse(value)
        except ValueError as error:
            raise ValueError(f"{where}: {key}: {error}") from error
    if "concurrency" in own and "rate" in own:
        raise ValueError(f"{where}: concurrency (closed loop) and rate (open loop) exclude each other")
    if "share" in table and ("concurrency" in own or "rate" in own):
        raise ValueError(f"{where}: a class with a load of its own has no share")
    return ServiceClass(name, changes=changes, **own)


def _between(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{value!r}: expected a number from {low:g} to {high:g}")
        return float(value)

    return parse


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r}: expected a whole number of at least 1")
    return value


def _text(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda value: parse(str(value))


KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "share": ("", _between(1e-9, 1e9)),
    "slo": ("", _text(parse_slo)),
    "concurrency": ("", _count),
    "rate": ("", _between(1e-6, 1e6)),
    "prompt_tokens": ("prompt_tokens", _text(parse_distribution)),
    "output_tokens": ("output_tokens", _text(parse_distribution)),
    "shared_prefix": ("shared_prefix", _between(0.0, 1.0)),
    "prefixes": ("prefixes", _count),
    "turns": ("turns", _text(parse_distribution)),
    "think": ("think_s", _between(0.0, 1e6)),
    "leave": ("leave", _text(parse_leave)),
}
"""By key: the field of :class:`Workload`, or none, and how its value is read."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Endless requests, and when they come."""

    requests: Iterator[BenchRequest]
    rate: float | None
    """Per second; ``None``: a closed loop."""
    concurrency: int
    seed: int
    """Of arrivals."""
    is_own: bool = False
    """Of one class with a load of its own."""


def flows(
    classes: Sequence[ServiceClass], base: Workload, stream: str, rate: float | None, concurrency: int, seed: int
) -> list[Flow]:
    """The load of the flags, unless all classes have one of their own, and those of such classes."""
    own = [each for each in classes if each.has_load]
    found = [Flow(mixed(classes, base, stream), rate, concurrency, seed)] if len(own) < len(classes) or not own else []
    for number, each in enumerate(own, 1):
        requests = each.workload(base).requests(stream)
        found.append(Flow(requests, each.rate, each.concurrency or 1, seed + number, is_own=True))
    return found


def mixed(classes: Sequence[ServiceClass], base: Workload, stream: str) -> Iterator[BenchRequest]:
    """Endless requests of the load of the flags: mixed, where classes share it."""
    sharing = [each for each in classes if not each.has_load]
    return _drawn(sharing, base, stream) if sharing else base.requests(stream)


def _drawn(classes: Sequence[ServiceClass], base: Workload, stream: str) -> Iterator[BenchRequest]:
    """Of a class each, drawn by their shares."""
    chance = random.Random(f"{base.seed}/{stream}/classes")
    sources = [each.workload(base).requests(stream) for each in classes]
    index = 0
    while True:
        (source,) = chance.choices(sources, [each.share for each in classes])
        yield replace(next(source), index=index)
        index += 1
