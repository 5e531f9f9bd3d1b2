"""Devices, as their data sheets describe them: the table is ``devices.toml``, with the source of each figure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.estimates.reading import read

GB, GIB, TERA = 10**9, 2**30, 10**12
RECALLED = "recalled"
"""The source of figures for which no source was read."""
FIGURES = (
    "memory_gb", "memory_gib", "bandwidth_gb_s", "bf16_tflops", "fp8_tflops", "int8_tflops", "fp4_tflops", "link_gb_s",
    "watts", "usd_per_hour",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """One of several alike that are linked with each other."""

    name: str
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes/s at which memory is read."""
    flops: float
    """FLOP/s of dense products in 16 bits."""
    link: float
    """Bytes/s to the others, in one direction."""
    source: str

    def __post_init__(self) -> None:
        for key in ("memory", "bandwidth", "flops", "link"):
            if not getattr(self, key) > 0:
                raise EstimateError(f"device {self.name}: {key} {getattr(self, key)}, expected a positive number")


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One row of the table. A figure that is not in ``figures`` is unknown."""

    name: str
    kind: str
    """``cuda``, ``rocm`` or ``cpu``."""
    aliases: tuple[str, ...]
    capability: tuple[int, int] | None
    """CUDA compute capability."""
    figures: Mapping[str, float]
    """By the names of :data:`FIGURES`, in the units these end with."""
    sources: Mapping[str, str]
    """By the same names."""
    usd_range: tuple[float, float] | None = None
    as_of: str = ""
    """Date of the table."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """What the sources are, by their short names."""

    @property
    def memory(self) -> int:
        """Bytes, as the driver reports; where that is unknown the name of the card in decimal GB, which is less."""
        if "memory_gib" in self.figures:
            return int(self.figures["memory_gib"] * GIB)
        return int(self._known("memory_gb") * GB)

    @property
    def recalled(self) -> tuple[str, ...]:
        """Names of figures without a source."""
        return tuple(name for name, source in self.sources.items() if source == RECALLED)

    def device(self, flops: str = "bf16_tflops") -> Device:
        """What estimates take. ``flops``: the rate of products. Raises :class:`EstimateError` where a figure that they
        need is unknown."""
        used = ("memory_gib" if "memory_gib" in self.figures else "memory_gb", "bandwidth_gb_s", flops, "link_gb_s")
        rate, bandwidth, link = (self._known(name) for name in (flops, "bandwidth_gb_s", "link_gb_s"))
        named = dict.fromkeys(self.texts.get(self.sources[name], self.sources[name]) for name in used)
        return Device(self.name, self.memory, bandwidth * GB, rate * TERA, link * GB, "; ".join(named))

    def _known(self, name: str) -> float:
        if name not in self.figures:
            raise EstimateError(f"device {self.name}: {name} is unknown")
        return self.figures[name]


def _sheets() -> dict[str, DataSheet]:
    table = tomllib.loads(files("engine_lab.shared.estimates").joinpath("devices.toml").read_text(encoding="utf-8"))
    return {name: _sheet(name, row, table) for name, row in table["devices"].items()}


def _sheet(name: str, row: dict[str, Any], table: dict[str, Any]) -> DataSheet:
    low_high = row.get("usd_range")
    return DataSheet(
        name=name,
        kind=row["kind"],
        aliases=tuple(row.get("aliases", ())),
        capability=tuple(row["capability"]) if "capability" in row else None,
        figures=MappingProxyType({key: float(row[key][0]) for key in FIGURES if key in row}),
        sources=MappingProxyType({key: row[key][1] for key in FIGURES if key in row}),
        usd_range=None if low_high is None else (low_high[0][0], low_high[0][1]),
        as_of=table["as_of"],
        texts=MappingProxyType(table["sources"]),
    )


SHEETS = _sheets()
"""By name: everything in the table."""
DEVICES = {sheet.name: sheet.device() for sheet in SHEETS.values() if sheet.kind == "cuda"}
"""By name: cards that estimates can be made of."""


def sheet(name: str) -> DataSheet:
    """One of :data:`SHEETS`, in upper or lower case. Raises :class:`EstimateError` for another."""
    known = {each.lower(): found for found in SHEETS.values() for each in (found.name, *found.aliases)}
    found = known.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), known, n=2)
        meant = f" (did you mean {' or '.join(dict.fromkeys(known[each].name for each in near))}?)" if near else ""
        raise EstimateError(f"device {name!r} is unknown{meant}: expected one of {', '.join(SHEETS)}")
    return found


def device(name: str) -> Device:
    """One of :data:`SHEETS` that estimates can be made of. Raises :class:`EstimateError` for another."""
    return sheet(name).device()


def device_from(values: object) -> Device:
    """As read from JSON: an object with the fields of :class:`Device`, of one rank where several share a device. Raises
    :class:`EstimateError`."""
    return read(Device, values, "device")
