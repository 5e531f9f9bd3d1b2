"""Entry of ``engine simulate``: a trace and plugin sets in, simulated figures out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import msgspec
from rich.console import Console

from engine.assembly.plan import EnginePlan
from engine.contracts.command import FAILED, OK, USAGE
from engine_lab.shared.errors import complain
from engine_lab.shared.output import check_writable, write_json
from engine_lab.shared.simulation.calibration import SCHEMA, Calibration, read_calibration
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.plans import most_blocks, resolve
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import EngineSpec, slower
from engine_lab.shared.simulation.stores import bound_of
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.reading import timed_trace
from engine_lab.simulate.assumptions import Assumption, Origin, drafts_for, load_of, overheads_for, steps_of
from engine_lab.simulate.compare import Verdict, compare
from engine_lab.simulate.figures import SOURCE, figures, measured_figures
from engine_lab.simulate.options import SimulateOptions, options_of
from engine_lab.simulate.screen import render

RESULT = "engine-simulate/2"


def run(flags: argparse.Namespace, words: list[str]) -> int:
    """Run ``engine simulate`` with parsed flags; returns the exit status."""
    try:
        options = options_of(flags, words)
        if options.json_file not in (None, "-"):
            check_writable(options.json_file, [str(options.trace)])
        result = _simulate(options)
    except ValueError as error:
        return complain("simulate", error, USAGE)
    if options.json_file == "-":
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
        return _status(result)
    Console().print(render(result))
    if options.json_file is not None:
        try:
            write_json(options.json_file, result)
        except OSError as error:
            return complain("simulate", f"--json {options.json_file}: {error.strerror or error}", FAILED)
    return _status(result)


def _status(result: dict[str, Any]) -> int:
    return FAILED if any("why_not" in each for each in result["sets"]) else OK


def _simulate(options: SimulateOptions) -> dict[str, Any]:
    combined = [(*options.overrides, *more) for more in ((), *options.compare)]
    calibrations = [calibration_of(options, words) for words in combined]
    if isinstance(calibrations[0], str):
        raise ValueError(calibrations[0])
    trace = load(options)
    prepared = [
        found if isinstance(found, str) else prepare(words, found, options, trace)
        for words, found in zip(combined, calibrations, strict=True)
    ]
    if not trace_tells(options):
        trace = [replace(request, measured=None) for request in trace]
    _check_store_rates(options, prepared)
    outcomes = list(_outcomes(options, prepared, trace))
    (first, *_) = outcomes
    assert not isinstance(first, str)
    sets = []
    for words, found, outcome in zip(((), *options.compare), prepared, outcomes, strict=True):
        if isinstance(found, str) or isinstance(outcome, str):
            sets.append({"overrides": list(words), "why_not": outcome})
            continue
        told = {"overrides": list(words), **figures(outcome, options.slo, found.knows_api)}
        if outcome is not first:
            told["against_first"] = [_told(verdict) for verdict in compare(first, outcome, options.batches)]
        sets.append(told)
    ready = [found for found in prepared if not isinstance(found, str)]
    return {
        "schema": RESULT,
        "source": SOURCE,
        "trace": str(options.trace),
        "overrides": list(options.overrides),
        "seed": options.seed,
        "faults": {
            "dies": [{"engine": engine, "at_s": at_s} for engine, at_s in options.deaths],
            "slow": [{"engine": engine, "factor": factor} for engine, factor in options.slow],
        },
        "kv_blocks": [found.spec.num_blocks for found in ready],
        "kv_stores": [_stores(found.spec) for found in ready],
        "assumptions": [msgspec.to_builtins(found.assumptions) for found in ready],
        "calibration": {
            "file": None if options.calibration is None else str(options.calibration),
            "measured_on": [found.measured_on for found in ready],
        },
        "measured": measured_figures(trace),
        "sets": sets,
    }


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plugin set that can be simulated."""

    spec: EngineSpec
    measured_on: str
    assumptions: tuple[Assumption, ...]
    knows_api: bool
    """What the API process takes is part of the figures."""


def _check_store_rates(options: SimulateOptions, sets: Sequence[Prepared | str]) -> None:
    known = {store["name"] for found in sets if not isinstance(found, str) for store in _stores(found.spec)}
    for name, _ in options.store_rates:
        if name not in known:
            raise ValueError(f"--store-rate {name}: expected a store of kv_store=[...], of one of the plugin sets")


def _outcomes(
    options: SimulateOptions, sets: Sequence[Prepared | str], trace: Sequence[TraceRequest]
) -> Iterator[Outcome | str]:
    """One after the other; after Ctrl-C those that are done."""
    deaths, stopped = dict(options.deaths), False
    for number, (more, found) in enumerate(zip(((), *options.compare), sets, strict=True), 1):
        if isinstance(found, str) or stopped:
            yield found if isinstance(found, str) else "stopped before it"
            continue
        if len(sets) > 1:
            print(f"engine simulate: {number} of {len(sets)}: {' '.join(more) or 'as given'}", file=sys.stderr)
        try:
            yield simulate(trace, fleet_of(found.spec, options), deaths=deaths, seed=options.seed)
        except KeyboardInterrupt:
            if number == 1:
                raise
            stopped = True
            yield "stopped while it ran"


def _stores(spec: EngineSpec) -> list[dict[str, Any]]:
    """What is assumed of each KV store."""
    return [
        {
            "name": choice.name,
            "stands_in": number > 0,
            "most_bytes": None if bound_of(choice) == inf else int(bound_of(choice)),
            "bytes_per_s": spec.rate(choice.name),
            "rate_is": "given" if choice.name in spec.rates else "assumed",
        }
        for number, choice in enumerate(spec.plan.slots.get("kv_store", ()))
    ]


def calibration_of(options: SimulateOptions, overrides: Sequence[str]) -> Calibration | str:
    """The file that stands for all plugin sets, or what this one has measured itself; a text: it has measured nothing.
    Raises ``ValueError``."""
    if options.calibration is not None:
        return read_calibration(options.calibration)
    from engine_lab.shared.sizing import measured_step_cost, size_plan  # imports torch

    sizing = size_plan(overrides, options.config_dirs)
    kept = measured_step_cost(sizing)
    if kept is None:
        return (
            "nothing was measured of this plan on this machine: serve it with some load first "
            f"({' '.join(('engine serve', *overrides))}; it keeps what steps cost at its end, or when it is idle five "
            "minutes after its start), or name what was measured with --calibration FILE, which stands for every set"
        )
    where = f"{sizing.plan.model.name} on {sizing.plan.device.name}, when it was last served"
    source = kept.told_with(where)
    return Calibration(SCHEMA, kept.cost, num_blocks=sizing.blocks or None, drafts=kept.drafts, measured_on=source)


def prepare(
    overrides: Sequence[str], calibration: Calibration, options: SimulateOptions, trace: Sequence[TraceRequest]
) -> Prepared:
    """The engine of a plugin set. ``memory.kv_tokens`` says how many KV blocks it has, or else the calibration; what a
    trace says of drafts is of the drafter that is given for all sets."""
    resolved = resolve(overrides, options.config_dirs)
    blocks, origin = _blocks_of(resolved.plan, calibration, "estimated" if options.calibration is None else "measured")
    recorded = resolve(options.overrides, options.config_dirs).plan.slots["drafter"]
    own = trace if resolved.plan.slots["drafter"] == recorded else ()
    drafts, of_drafts = drafts_for(resolved, calibration, own, options.acceptance)
    overheads, api = overheads_for(calibration, trace)
    pool = f"{(blocks - 1) * resolved.plan.block_size:,} tokens" + (
        "" if origin != "assumed" else ": as many as all rows can hold"
    )
    spec = EngineSpec(resolved.plan, blocks, calibration.step_cost, overheads, drafts, dict(options.store_rates))
    told = (
        *load_of(trace, options.rate, options.rate_scale),
        *steps_of(calibration, drafts is not None),
        *of_drafts,
        api,
        Assumption("KV pool", origin, pool),
    )
    return Prepared(spec, calibration.measured_on, told, api.origin != "unknown")


def _blocks_of(plan: EnginePlan, calibration: Calibration, origin: Origin) -> tuple[int, Origin]:
    """``origin``: of the calibration's number."""
    if plan.settings.memory.kv_tokens is not None:
        return most_blocks(plan), "given"
    if calibration.num_blocks is not None:
        return calibration.num_blocks, origin
    return most_blocks(plan), "assumed"


def trace_tells(options: SimulateOptions) -> bool:
    """What was measured of the trace's requests is of the same load."""
    same_load = options.rate is None and options.rate_scale == 1.0
    return same_load and options.engines == 1 and not options.deaths and not options.slow


def fleet_of(spec: EngineSpec, options: SimulateOptions) -> list[EngineSpec]:
    """The engines of a plugin set."""
    factors = dict(options.slow)
    return [
        replace(spec, step_cost=slower(spec.step_cost, factors[index])) if index in factors else spec
        for index in range(options.engines)
    ]


def load(options: SimulateOptions) -> list[TraceRequest]:
    """The requests, at the moments that the flags ask for."""
    trace = timed_trace(options.trace, options.format, options.limit, options.rate, options.seed)
    if options.rate is not None:
        return trace
    return [r if r.after else replace(r, arrival_s=r.arrival_s / options.rate_scale) for r in trace]


def _told(verdict: Verdict) -> dict[str, Any]:
    ratio = verdict.ratio
    bounds = None if ratio is None or ratio.interval is None else [ratio.interval.low, ratio.interval.high]
    return {
        "measure": verdict.measure,
        "ratio": None if ratio is None else ratio.value,
        "interval": bounds,
        "verdict": verdict.words,
    }
