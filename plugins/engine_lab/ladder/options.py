"""The command line of ``engine ladder``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from engine_lab.bench.load_options import LoadOptions, add_run_flags, run_fields
from engine_lab.bench.slo import Slo, parse_slo
from engine_lab.ladder.rungs import DEFAULT_RUNGS, Rung, check_names, parse_rung, read_rungs
from engine_lab.shared.argument_types import number, parsed, whole
from engine_lab.shared.statistics import LEVEL

LEAST_PAIRS = 6
PLAIN = (
    "pairs", "level", "concurrency", "rate", "requests", "shared_prefix", "text_file", "prompt_ids", "endpoint",
    "ignore_eos", "observe", "outputs", "seed", "resident",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LadderOptions(LoadOptions):
    """A ladder, as asked for."""

    rungs: tuple[Rung, ...]
    pairs: int
    level: float
    leave_one_out: bool
    resident: bool
    """Engines stay for all pairs of a comparison."""
    same: int
    """A/A comparisons."""
    floor: bool
    requests: int
    """Of one run."""
    observe: int
    outputs: int
    """Prompts whose greedy outputs are compared."""
    slo: Slo | None
    config_dirs: tuple[str, ...]

    def fixed(self) -> dict[str, Any]:
        """What must not change while a ladder is continued, as JSON."""
        return {name: getattr(self, name) for name in PLAIN} | {
            "prompt_tokens": str(self.prompt_tokens),
            "output_tokens": str(self.output_tokens),
            "slo": None if self.slo is None else str(self.slo),
        }


def options_of(flags: argparse.Namespace) -> LadderOptions:
    """Raises ``ValueError`` when the flags contradict each other."""
    rungs = [*(read_rungs(flags.rungs) if flags.rungs else ()), *(flags.rung or ())]
    if not flags.rungs and not flags.rung:
        rungs = [parse_rung(text) for text in DEFAULT_RUNGS]
    check_names(rungs)
    if not 0.5 <= flags.level < 1.0:
        raise ValueError(f"--level {flags.level:g}: expected at least 0.5 and less than 1")
    return LadderOptions(
        **run_fields(flags),
        rungs=tuple(rungs),
        pairs=flags.pairs,
        level=flags.level,
        leave_one_out=not flags.no_leave_one_out,
        resident=flags.resident,
        same=flags.aa,
        floor=not flags.no_floor,
        requests=flags.requests,
        observe=flags.observe,
        outputs=flags.outputs,
        slo=flags.slo,
        config_dirs=tuple(getattr(flags, "config_dir", None) or ()),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``engine ladder``, each with its default in its help."""
    _add_ladder_flags(parser.add_argument_group("ladder"))
    _add_workload_flags(parser.add_argument_group("workload, of every run"))
    add = parser.add_argument_group("result").add_argument
    add("--slo", type=parsed(parse_slo), metavar="LIMITS", help="compare goodput, for example ttft=200ms,itl=20ms")
    add("--json", metavar="FILE", help="save after every pair; the same figures as in the report")
    add("--html", metavar="FILE", help="write the report: one page, without network")
    add("--resume", metavar="FILE", help="continue a file of --json (and report a finished one anew)")


def _add_ladder_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rung", type=parsed(parse_rung), action="append", metavar="RUNG", help="'NAME: OVERRIDE ...', repeatable")
    add("--rungs", metavar="FILE", help="a rung a line (default: those listed below)")
    add("--pairs", type=whole(LEAST_PAIRS), default=10, metavar="N", help="pairs of runs a comparison (%(default)s)")
    add("--level", type=number(0.0), default=LEVEL, metavar="L", help="of each interval alone (%(default)s)")
    add(
        "--resident", action="store_true", help="start engines once a comparison, not for every pair: quicker, see docs"
    )
    add("--no-leave-one-out", action="store_true", help="add rungs only")
    add("--aa", type=whole(0), default=0, metavar="N", help="also compare the baseline with itself N times (0)")
    add("--no-floor", action="store_true", help="leave out engine bench-machine, which takes 15 s")


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    add_run_flags(group, requests=10, tokens="512", shared_prefix=0.8)
    add = group.add_argument
    add("--observe", type=whole(1), default=100, metavar="N", help="requests that max_tokens=p99 is of (%(default)s)")
    add("--outputs", type=whole(0), default=8, metavar="N", help="greedy outputs compared at each rung (%(default)s)")
