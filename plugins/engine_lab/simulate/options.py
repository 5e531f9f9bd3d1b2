"""The command line of ``engine simulate``."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from engine_lab.bench.slo import Slo, parse_slo
from engine_lab.shared.argument_types import number, parsed, whole
from engine_lab.shared.simulation.traces.reading import FORMATS


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    trace: Path
    format: str
    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...]
    compare: tuple[tuple[str, ...], ...]
    """Further overrides of each plugin set that is compared with the first."""
    calibration: Path | None
    rate: float | None
    """Requests per second, as a Poisson process in place of the trace's arrivals."""
    rate_scale: float
    limit: int | None
    engines: int
    deaths: tuple[tuple[int, float], ...]
    """Engines by index, and when they die (s)."""
    slow: tuple[tuple[int, float], ...]
    """Engines by index, and how many times as long their steps take."""
    store_rates: tuple[tuple[str, float], ...]
    """KV stores by name, and bytes a second."""
    acceptance: float | None
    """``None``: as measured."""
    seed: int
    batches: int
    slo: Slo | None
    json_file: str | None


def options_of(flags: argparse.Namespace, words: list[str]) -> SimulateOptions:
    """Raises ``ValueError``."""
    files = [word for word in words if "=" not in word and not word.startswith(("+", "~"))]
    if len(files) != 1:
        given = f"{len(files)} files: {', '.join(files)}" if files else "none"
        raise ValueError(f"expected one trace, as in engine simulate TRACE [overrides]; there are {given}")
    if flags.rate is not None and flags.rate_scale is not None:
        raise ValueError("--rate (arrivals of its own) and --rate-scale (those of the trace) exclude each other")
    faults = {"--dies": tuple(flags.dies), "--slow": tuple(flags.slow)}
    for flag, of_engines in faults.items():
        for engine, _ in of_engines:
            if engine >= flags.engines:
                raise ValueError(f"{flag} {engine}: expected an engine from 0 to {flags.engines - 1} (--engines)")
    return SimulateOptions(
        trace=Path(files[0]),
        format=flags.format,
        overrides=tuple(word for word in words if word != files[0]),
        config_dirs=tuple(flags.config_dir),
        compare=tuple(tuple(shlex.split(text)) for text in flags.compare),
        calibration=None if flags.calibration is None else Path(flags.calibration),
        rate=flags.rate,
        rate_scale=flags.rate_scale or 1.0,
        limit=flags.limit,
        engines=flags.engines,
        deaths=faults["--dies"],
        slow=faults["--slow"],
        store_rates=tuple(flags.store_rate),
        acceptance=flags.acceptance,
        seed=flags.seed,
        batches=flags.batches,
        slo=flags.slo,
        json_file=flags.json,
    )


def of_engine(text: str) -> tuple[int, float]:
    """``2@30``: an engine, from 0 on, and a number above 0. Raises ``ValueError``."""
    engine, _, given = text.partition("@")
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not engine.isdecimal() or not 0.0 < value < float("inf"):
        raise ValueError(f"{text}: expected an engine and a number above 0, as in 2@30")
    return int(engine), value


def of_store(text: str) -> tuple[str, float]:
    """``disk=2.5``: a KV store, and GB a second; in bytes. Raises ``ValueError``."""
    name, _, given = text.partition("=")
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not name or not 0.0 < value < float("inf"):
        raise ValueError(f"{text}: expected a KV store and GB a second above 0, as in disk=2.5")
    return name, value * 1e9


def share(text: str) -> float:
    """A chance. Raises ``ValueError``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{text}: expected a number from 0 to 1")
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag, each with its default in its help."""
    load = parser.add_argument_group("load")
    load.add_argument("--format", choices=("auto", *FORMATS), default="auto", help="of the trace (%(default)s)")
    load.add_argument("--limit", type=whole(1), metavar="N", help="the first N requests of the trace")
    load.add_argument(
        "--rate-scale", type=number(1e-6), metavar="X", help="X times as many requests per second as the trace has (1)"
    )
    load.add_argument("--rate", type=number(1e-6), metavar="R", help="R requests per second, at random moments")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--calibration", metavar="FILE", help="what steps cost; default: the one saved for this plan")
    engine.add_argument("--engines", type=whole(1), default=1, metavar="N", help="behind the router (%(default)s)")
    engine.add_argument(
        "--dies",
        action="append",
        default=[],
        type=parsed(of_engine),
        metavar="ENGINE@S",
        help="an engine, from 0 on, that dies after S seconds; repeatable",
    )
    engine.add_argument(
        "--slow",
        action="append",
        default=[],
        type=parsed(of_engine),
        metavar="ENGINE@X",
        help="an engine whose steps take X times as long; repeatable",
    )
    engine.add_argument(
        "--store-rate",
        action="append",
        default=[],
        type=parsed(of_store),
        metavar="STORE=GB/S",
        help="of a KV store: of the first between the KV pool and memory, of others from and to them; repeatable",
    )
    engine.add_argument(
        "--acceptance",
        type=parsed(share),
        metavar="P",
        help="chance that a draft is accepted (as measured: in the trace, else where steps were; else 0.6)",
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--compare", action="append", default=[], metavar="OVERRIDES", help="a plugin set to compare with; repeatable"
    )
    result.add_argument(
        "--batches", type=whole(6), default=20, metavar="N", help="parts of the trace for intervals (%(default)s)"
    )
    result.add_argument(
        "--slo", type=parsed(parse_slo), metavar="LIMITS", help="count goodput, for example ttft=200ms,itl=20ms"
    )
    result.add_argument("--seed", type=whole(0), default=0, metavar="N", help="%(default)s")
    result.add_argument("--json", metavar="FILE", help="write the figures there as well (- : to stdout, instead)")
