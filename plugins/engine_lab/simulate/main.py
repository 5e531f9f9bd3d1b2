"""Entry of ``engine simulate``: a trace and plugin sets in, simulated figures out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import msgspec
from rich.console import Console

from engine.contracts.command import FAILED, OK, USAGE
from engine_lab.shared.output import check_writable, write_json
from engine_lab.shared.simulation.calibration import SCHEMA, Calibration, read_calibration
from engine_lab.shared.simulation.plans import most_blocks, resolve
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import Drafts, EngineSpec, slower
from engine_lab.shared.simulation.stores import bound_of
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.reading import read_trace, with_rate
from engine_lab.simulate.compare import Verdict, compare
from engine_lab.simulate.figures import SOURCE, figures
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
        print(f"engine simulate: {error}", file=sys.stderr)
        return USAGE
    if options.json_file == "-":
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
        return OK
    Console().print(render(result))
    if options.json_file is not None:
        try:
            write_json(options.json_file, result)
        except OSError as error:
            print(f"engine simulate: --json {options.json_file}: {error.strerror or error}", file=sys.stderr)
            return FAILED
    return OK


def _simulate(options: SimulateOptions) -> dict[str, Any]:
    combined = [(*options.overrides, *more) for more in ((), *options.compare)]
    calibrations = calibrations_of(options, combined)
    trace = load(options)
    specs = [spec_of(words, found, options) for words, found in zip(combined, calibrations, strict=True)]
    stores = [_stores(spec) for spec in specs]
    for name, _ in options.store_rates:
        if name not in {store["name"] for of_set in stores for store in of_set}:
            raise ValueError(f"--store-rate {name}: expected a store of kv_store=[...], of one of the plugin sets")
    deaths = dict(options.deaths)
    outcomes = [simulate(trace, fleet_of(spec, options), deaths=deaths, seed=options.seed) for spec in specs]
    sets = [{"overrides": [], **figures(outcomes[0], options.slo)}]
    for words, outcome in zip(options.compare, outcomes[1:], strict=True):
        verdicts = compare(outcomes[0], outcome, options.batches)
        told = {"overrides": list(words), **figures(outcome, options.slo)}
        sets.append({**told, "against_first": [_told(verdict) for verdict in verdicts]})
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
        "kv_blocks": [spec.num_blocks for spec in specs],
        "kv_stores": stores,
        "calibration": {
            "file": None if options.calibration is None else str(options.calibration),
            "measured_on": [found.measured_on for found in calibrations],
        },
        "sets": sets,
    }


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


def calibrations_of(options: SimulateOptions, sets: Sequence[Sequence[str]]) -> list[Calibration]:
    """Of each plugin set: what it has measured itself, or the file that stands for all. Raises ``ValueError``."""
    if options.calibration is not None:
        return [read_calibration(options.calibration)] * len(sets)
    return [_kept(options, overrides) for overrides in sets]


def _kept(options: SimulateOptions, overrides: Sequence[str]) -> Calibration:
    from engine_lab.shared.sizing import measured_step_cost, size_plan  # imports torch

    sizing = size_plan(overrides, options.config_dirs)
    kept = measured_step_cost(sizing)
    if kept is None:
        raise ValueError(
            "nothing was measured of this plan on this machine: serve it with some load first "
            f"({' '.join(('engine serve', *overrides))}; it keeps what steps cost at its end, or when it is idle five "
            "minutes after its start), or name what was measured with --calibration FILE, which stands for every set"
        )
    where = f"{sizing.plan.model.name} on {sizing.plan.device.name}, when it was last served"
    return Calibration(SCHEMA, kept.cost, num_blocks=sizing.blocks or None, measured_on=kept.told_with(where))


def spec_of(overrides: Sequence[str], calibration: Calibration, options: SimulateOptions) -> EngineSpec:
    """The engine of a plugin set. ``memory.kv_tokens`` says how many KV blocks it has, or else the calibration."""
    resolved = resolve(overrides, options.config_dirs)
    blocks = most_blocks(resolved.plan)
    if resolved.plan.settings.memory.kv_tokens is None and calibration.num_blocks is not None:
        blocks = calibration.num_blocks
    drafts = None
    if resolved.drafting is not None:
        drafts = Drafts(resolved.drafting, options.acceptance, calibration.ms_per_draft)
    rates = dict(options.store_rates)
    return EngineSpec(resolved.plan, blocks, calibration.step_cost, calibration.overheads, drafts, rates)


def fleet_of(spec: EngineSpec, options: SimulateOptions) -> list[EngineSpec]:
    """The engines of a plugin set."""
    factors = dict(options.slow)
    return [
        replace(spec, step_cost=slower(spec.step_cost, factors[index])) if index in factors else spec
        for index in range(options.engines)
    ]


def load(options: SimulateOptions) -> list[TraceRequest]:
    """The requests, at the moments that the flags ask for."""
    trace = read_trace(options.trace, options.format, options.limit)
    if options.rate is None:
        return [r if r.after else replace(r, arrival_s=r.arrival_s / options.rate_scale) for r in trace]
    return with_rate(trace, options.rate, options.seed)


def _told(verdict: Verdict) -> dict[str, Any]:
    ratio = verdict.ratio
    bounds = None if ratio is None or ratio.interval is None else [ratio.interval.low, ratio.interval.high]
    return {
        "measure": verdict.measure,
        "ratio": None if ratio is None else ratio.value,
        "interval": bounds,
        "verdict": verdict.words,
    }
