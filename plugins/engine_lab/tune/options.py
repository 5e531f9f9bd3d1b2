"""The command line of ``engine tune``, and the grid that it has without one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_lab.sweep.grid import axes_of
from engine_lab.sweep.options import SweepOptions, add_load, add_measuring, options_of

GRID = (
    "drafter=*",
    "quantizer=checkpoint,int8",
    "scheduler=chunked_prefill,chunked_prefill_latency,chunked_prefill_throughput",
)
"""The slots that matter to most loads. An override of one of these keys takes its place."""
KEEP = 3
SWEEP_SHARE = 0.6
"""Of the budget; the rest is for the proof."""
BUDGET = "30m"
MOST_LOSS = 0.01
"""Of quality, unless the flags say otherwise."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """A tuning, as asked for."""

    sweep: SweepOptions
    """With its share of the budget."""
    budget_s: float
    headroom: bool
    preset: Path | None
    """The file to write; ``None``: in the folder."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``engine tune``, each with its default in its help."""
    add = parser.add_argument_group("tune").add_argument
    add(
        "--preset",
        metavar="FILE",
        help="write it there, as DIR/preset/NAME.yaml (default: preset/mine.yaml in --folder)",
    )
    add("--headroom", action="store_true", help="then raise the load until neither set keeps the SLO; not in --budget")
    add_measuring(parser)
    add_load(parser)
    parser.set_defaults(budget=BUDGET, by=None, keep=KEEP, keep_equal=False)


def tune_options_of(flags: argparse.Namespace) -> TuneOptions:
    """Raises ``ValueError`` when the flags contradict each other."""
    if flags.max_loss is None and not flags.no_quality:
        flags.max_loss = MOST_LOSS
    preset = None if flags.preset is None else Path(flags.preset)
    if preset is not None and (preset.parent.name != "preset" or preset.suffix != ".yaml"):
        raise ValueError(f"--preset {preset}: expected DIR/preset/NAME.yaml, which --config-dir DIR +preset=NAME loads")
    sweep = options_of(flags, SWEEP_SHARE)
    if sweep.limits is None:
        raise ValueError(
            "--slo is missing: what is to be kept, for example --slo ttft=500ms,itl=50ms, or slo in a class of "
            "--workload"
        )
    return TuneOptions(sweep, flags.budget, flags.headroom, preset)


def split(words: Sequence[str], config_dirs: Sequence[Path]) -> tuple[list[str], list[str]]:
    """The overrides of the baseline, and those of the grid: which stand for several values, and of :data:`GRID` those
    of keys that no override has. Raises :class:`~engine.assembly.errors.AssemblyError`."""
    axes = axes_of(words, config_dirs)
    base = [axis[0] for axis in axes if len(axis) == 1]
    swept = [word for word, axis in zip(words, axes, strict=True) if len(axis) > 1]
    keys = {key_of(word) for word in words}
    return base, swept or [word for word in GRID if key_of(word) not in keys]


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]
