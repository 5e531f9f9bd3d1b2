"""The command line of ``engine sweep``."""

from __future__ import annotations

import argparse
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.contracts.percentiles import FEWEST
from engine_lab.bench.load_options import LoadOptions, add_run_flags, run_fields
from engine_lab.bench.mixture import ServiceClass, read_mixture
from engine_lab.bench.slo import Slo, parse_slo
from engine_lab.shared.argument_types import number, parsed, whole
from engine_lab.sweep.figures import FIGURES, PERCENTILE
from engine_lab.sweep.sampler import check_sampler

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Load(LoadOptions):
    """What is sent in every run."""

    requests: int
    warmup: int
    temperature: float
    trace: str | None = None
    """A file whose requests are sent, at its moments unless there is a ``rate``."""
    speed: float = 1.0
    duration_s: float | None = None
    """How long requests are sent, in place of so many."""
    workload: str | None = None
    """The file of :attr:`classes`."""
    classes: tuple[ServiceClass, ...] = ()

    def __str__(self) -> str:
        if self.trace is not None:
            sent = f"{self.rate:g} requests/s" if self.rate else f"{self.speed:g} times as fast as it was"
            return f"runs of the first {self.requests} requests of {self.trace}, {sent}"
        sent = f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at once"
        length = f"{self.requests} requests" if self.duration_s is None else f"{self.duration_s:g} s"
        if self.classes:
            own = [f"{each.name} {_own(each)}" for each in self.classes if each.has_load]
            names = [each.name for each in self.classes if not each.has_load]
            loads = [f"{', '.join(names)} {sent}"] if names else []
            return f"runs of {length}: {'; '.join([*loads, *own])} ({self.workload})"
        shared = f", {self.shared_prefix:.0%} of them shared" if self.shared_prefix else ""
        return (
            f"runs of {length}, {sent}; prompts of {self.prompt_tokens} tokens{shared}; answers up to "
            f"{self.output_tokens} tokens"
        )

    @property
    def class_slos(self) -> dict[str, Slo]:
        """By class, in place of the limits for all."""
        return {each.name: each.slo for each in self.classes if each.slo is not None}


def _own(each: ServiceClass) -> str:
    return f"{each.rate:g} requests/s" if each.rate else f"{each.concurrency} at once"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """A sweep, as asked for."""

    load: Load
    budget_s: float
    by: str
    """Key of the figure that sets are ordered by."""
    keep: int
    """Sets of the last round."""
    slo: Slo | None
    quality: bool
    quality_text: str | None
    max_loss: float | None
    samples: int | None
    """Sets of the grid that are measured, as a sampler picks them; ``None``: all."""
    resident: bool
    keep_equal: bool
    share: float
    """Of the budget that was asked for, which ``budget_s`` is."""
    folder: str | None
    config_dirs: tuple[Path, ...]

    @property
    def limits(self) -> str | None:
        """Those of all requests, and those of classes, in words; ``None``: there are none."""
        of_classes = [f"{name} {slo}" for name, slo in self.load.class_slos.items()]
        return "; ".join([*([] if self.slo is None else [str(self.slo)]), *of_classes]) or None

    def fixed(self) -> dict[str, Any]:
        """What must not change while a sweep is continued, as JSON."""
        alone = replace(self, budget_s=0.0, folder=None)
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(alone, enc_hook=str))
        load: dict[str, Any] = found.pop("load")
        return found | load

    def folder_of(self, words: list[str], command: str) -> Path:
        """Named by what is asked for, so that the same command goes on where it was."""
        if self.folder is not None:
            return Path(self.folder)
        asked = msgspec.json.encode((words, self.fixed()))
        return Path(f"{command}-{hashlib.sha256(asked).hexdigest()[:8]}")


def options_of(flags: argparse.Namespace, share: float = 1.0) -> SweepOptions:
    """``share``: of the budget. Raises ``ValueError`` when the flags contradict each other."""
    load = load_of(flags)
    has_limits = flags.slo is not None or bool(load.class_slos)
    by = flags.by or ("slo" if has_limits else "e2e")
    if by == "slo" and not has_limits:
        raise ValueError("--by slo needs the limits: --slo ttft=500ms,itl=50ms, or slo of a class of --workload")
    is_counted = flags.duration is None and not load.classes
    if by in ("slo", "ttft_p95") and is_counted and flags.requests < (least := FEWEST[PERCENTILE]):
        raise ValueError(
            f"--requests {flags.requests}: expected at least {least}, as --by {by} compares a P{PERCENTILE} of each run"
        )
    if flags.samples is not None:
        check_sampler()
        if flags.samples <= flags.keep:
            raise ValueError(f"--samples {flags.samples}: expected more than the {flags.keep} sets of the last round")
    if flags.max_loss is not None and flags.no_quality:
        raise ValueError("--quality and --no-quality exclude each other")
    return SweepOptions(
        load=load,
        budget_s=flags.budget * share,
        by=by,
        keep=flags.keep,
        slo=flags.slo,
        quality=not flags.no_quality,
        quality_text=flags.quality_text,
        max_loss=flags.max_loss,
        samples=flags.samples,
        resident=flags.resident,
        keep_equal=flags.keep_equal,
        share=share,
        folder=flags.folder,
        config_dirs=tuple(flags.config_dir),
    )


def load_of(flags: argparse.Namespace) -> Load:
    """Raises ``ValueError`` when the flags contradict each other."""
    if flags.trace is not None and flags.concurrency is not None:
        raise ValueError("--trace has moments of its own, or those of --rate: leave --concurrency out")
    if flags.trace is not None and (flags.workload is not None or flags.duration is not None):
        raise ValueError("--trace has its own requests, as many as --requests: it takes no --workload or --duration")
    classes = () if flags.workload is None else read_mixture(flags.workload)
    if flags.prompt_ids is not None and any("turns" in each.changes for each in classes):
        raise ValueError("--workload: turns need answers as texts: they take no --prompt-ids")
    if any(each.has_load for each in classes) and flags.duration is None:
        raise ValueError("--workload: a class with a load of its own runs for a time: expected --duration S")
    return Load(
        **run_fields(flags),
        requests=flags.requests,
        warmup=flags.warmup,
        temperature=flags.temperature,
        trace=flags.trace,
        speed=flags.speed,
        duration_s=flags.duration,
        workload=flags.workload,
        classes=classes,
    )


def seconds(text: str) -> float:
    """``90s``, ``15m`` or ``2h``. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r}: expected a time such as 90s, 15m or 2h")
    return float(found[1]) * UNITS[found[2]]


def percent(text: str) -> float:
    """``1%`` as 0.01. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if found is None:
        raise ValueError(f"{text!r}: expected a share in per cent, such as 1%")
    return float(found[1]) / 100.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``engine sweep``, each with its default in its help."""
    add = parser.add_argument_group("sweep").add_argument
    keys = [figure.key for figure in FIGURES]
    add("--by", choices=keys, help="figure that sets are ordered by (slo with --slo, else e2e)")
    add("--keep", type=whole(2), default=3, metavar="N", help="sets of the last round (%(default)s)")
    add(
        "--keep-equal", action="store_true", help="measure sets with equal plans each: such a sweep must name no winner"
    )
    add_measuring(parser)
    add_load(parser)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Flags that ``engine tune`` has, too."""
    add = parser.add_argument_group("measuring").add_argument
    add("--slo", type=parsed(parse_slo), metavar="LIMITS", help="for example ttft=500ms,itl=50ms")
    add("--budget", type=parsed(seconds), default="15m", metavar="TIME", help="90s, 15m, 2h (%(default)s)")
    add("--samples", type=whole(2), metavar="N", help="measure N sets, as Optuna picks them, not all (engine[optuna])")
    add("--folder", metavar="DIR", help="of plan and results; the same again goes on (default: named by the words)")
    add("--resident", action="store_true", help="keep the engines of a round up, instead of one process for every run")
    quality = parser.add_argument_group("quality, by engine eval").add_argument
    quality("--quality", dest="max_loss", type=parsed(percent), metavar="LOSS", help="drop sets that lose more, as 1%%")
    quality("--quality-text", metavar="FILE", help="text to score (bundled model: its own; others: Python's manual)")
    quality("--no-quality", action="store_true", help="do not measure it")


def add_load(parser: argparse.ArgumentParser) -> None:
    """The load of every run."""
    group = parser.add_argument_group("load, of every run")
    add = group.add_argument
    add("--trace", metavar="FILE", help="send the first requests of a trace, which engine simulate reads, too")
    add("--speed", type=number(1e-6), default=1.0, metavar="X", help="X times as fast as the trace (%(default)g)")
    add("--workload", metavar="FILE", help="classes of requests that come mixed, as engine bench reads them")
    add("--duration", type=number(0.001), metavar="S", help="send for S seconds in every run, in place of --requests")
    add("--warmup", type=whole(0), default=4, metavar="N", help="unmeasured requests first (%(default)s)")
    add("--temperature", type=number(0.0), default=0.0, metavar="T", help="sampling temperature (%(default)g)")
    add_run_flags(group, requests=20)
