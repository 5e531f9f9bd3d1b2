"""A shadow of an engine: overrides that make the same one, and a load like the one it had."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean

from engine.contracts.slots import SLOTS
from engine_lab.doctor.evidence import Engine, Evidence
from engine_lab.ladder import options
from engine_lab.ladder.options import LadderOptions
from engine_lab.ladder.rungs import Form, merged
from engine_lab.shared.flags import assignment

IDLE = 0.8
"""An engine less busy than this was not waited for by its clients: requests came at a rate of their own."""


def overrides_of(engine: Engine, changes: Sequence[str] = ()) -> tuple[str, ...]:
    """Of an engine set up alike but for ``changes``. Where they choose another plugin, what could be set of the old one
    alone is left out."""
    replaced = {word.partition("=")[0] for word in changes} & engine.slots.keys()

    def stays(key: str) -> bool:
        slot, _, name = key.partition(".")
        return slot not in replaced or name in {field.name for field in fields(SLOTS[slot].config)}

    slots = (f"{slot}={name}" for slot, name in engine.slots.items())
    settings = (assignment(key, value) for key, value in engine.settings.items() if stays(key))
    return merged((assignment("model.path", engine.path), *slots, *settings), changes)


def workload_of(evidence: Evidence, requests: int) -> str:
    """Flags of ``engine ladder`` for a load like the recorded one, by its means."""

    def mean(name: str) -> float:
        return fmean(figures[name] for figures in evidence.windows)

    at_once = max(1, round(mean("running_mean") + mean("waiting_mean")))
    rate = sum(figures["requests"] for figures in evidence.windows) / sum(f["seconds"] for f in evidence.windows)
    load = f"--rate {rate:.3g}" if mean("busy_share") < IDLE else f"--concurrency {at_once}"
    shared = min(0.99, max(figures.get("shared_share", figures["cached_share"]) for figures in evidence.windows))
    return (
        f"{load} --requests {requests} --prompt-tokens {max(1, round(mean('prompt_mean')))} "
        f"--output-tokens {max(1, round(mean('output_mean')))} --shared-prefix {shared:.2g} --ignore-eos"
    )


def options_of(flags: str, pairs: int, config_dirs: Sequence[str] = ()) -> LadderOptions:
    """Raises ``ValueError`` for flags that ``engine ladder`` does not have."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    options.add_flags(parser)
    try:
        parsed, rest = parser.parse_known_args(shlex.split(flags))
    except argparse.ArgumentError as error:
        raise ValueError(f"--workload {flags!r}: {error}") from error
    if rest:
        raise ValueError(f"--workload {flags!r}: {rest[0]} is no flag of engine ladder")
    parsed.pairs = pairs
    return options.options_of(parsed)


def form_of(evidence: Evidence) -> Form:
    """Of the requests: streamed, if most were."""
    return Form(stream=evidence.windows[-1]["stream_share"] >= 0.5, static_first=True)
