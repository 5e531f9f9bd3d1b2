"""In which order sets are measured first: as a simulation of the load has them, where their steps were measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from engine.contracts.percentiles import describe
from engine.contracts.step_cost import DraftCost
from engine_lab.bench.slo import Slo
from engine_lab.plan.workload import PlannedLoad
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.plans import resolve
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import Drafts, EngineSpec
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.sweep.figures import BY_KEY, PERCENTILE
from engine_lab.sweep.load import trace_of
from engine_lab.sweep.options import Load, SweepOptions
from engine_lab.sweep.record import Candidate, Experiment


def order_candidates(experiment: Experiment, options: SweepOptions) -> list[int]:
    """Ids of those to measure. Raises ``ValueError`` for a trace that cannot be read."""
    able = experiment.able()
    random.Random(f"{options.load.seed}/order").shuffle(able)
    if options.samples is not None:
        experiment.order = f"as Optuna's TPE sampler picks {options.samples} sets, of seed {options.load.seed}"
        return [one.id for one in able]
    if options.load.classes or options.load.duration_s is not None:
        experiment.order = f"random, of seed {options.load.seed}: a mixture, or a load by time, is not simulated"
        return [one.id for one in able]
    requests = simulated_load(options.load)
    for one in able:
        one.predicted = predicted(one, requests, options)
        if one.predicted is None:
            experiment.order = f"random, of seed {options.load.seed}: what steps cost was not measured with {one.name}"
            return [one.id for one in able]
    experiment.order = "by simulation with the step costs that these sets have measured on this machine"
    return [one.id for one in sorted(able, key=lambda one: one.predicted or 0.0)]


def predicted(candidate: Candidate, requests: Sequence[TraceRequest], options: SweepOptions) -> float | None:
    """The figure that sets are ordered by, so that less is better; ``None``: the set's steps were never measured, or it
    cannot be simulated."""
    spec = spec_of(candidate.words, options.config_dirs)
    if spec is None:
        return None
    try:
        found = figure(simulate(requests, [spec], seed=options.load.seed), options.by, options.slo)
    except ValueError:
        return None
    return None if not found else BY_KEY[options.by].worse(found)


def spec_of(words: Sequence[str], config_dirs: Sequence[Path]) -> EngineSpec | None:
    """The engine of a set, with what it has measured; ``None``: it has not."""
    from engine.assembly.errors import AssemblyError
    from engine_lab.shared.sizing import measured_step_cost, size_plan  # imports torch

    try:
        sizing = size_plan(words, config_dirs)
        kept = measured_step_cost(sizing)
        resolved = resolve(words, config_dirs)
    except (ValueError, AssemblyError):
        return None
    if kept is None or not sizing.blocks:
        return None
    drafts = None if resolved.drafting is None else Drafts(resolved.drafting, kept.drafts or DraftCost())
    return EngineSpec(resolved.plan, sizing.blocks, kept.cost, drafts=drafts)


def simulated_load(load: Load) -> list[TraceRequest]:
    """As many requests as a run has. In a closed loop each waits for the one before it."""
    if (trace := trace_of(load)) is not None:
        return [replace(one, arrival_s=one.arrival_s / load.speed) for one in trace]
    made = PlannedLoad(load.prompt_tokens, load.output_tokens, load.rate or 1.0, load.shared_prefix)
    requests = made.requests(load.requests, load.seed, load.rate or inf)
    if load.rate is not None:
        return requests
    return [
        replace(one, request_id=str(i), after=(str(i - load.concurrency),) if i >= load.concurrency else ())
        for i, one in enumerate(requests)
    ]


def figure(outcome: Outcome, by: str, slo: Slo | None) -> float | None:
    """Of a simulation; ``None`` where requests are refused."""
    served = outcome.requests
    if any(request.error for request in served):
        return None
    if by == "tokens_per_s":
        return sum(request.output_tokens for request in served) / outcome.duration_s
    if by == "itl_p95":
        return describe([(us / 1e3, count) for us, count in outcome.itl_us])["p95"]
    if by == "slo" and slo is not None:
        values = {"e2e": "e2e_ms", "ttft": "ttft_ms", "itl": "itl_ms", "tpot": "itl_ms"}
        taken = [max(getattr(one, values[name]) / limit for name, limit in slo.limits_ms) for one in served]
        return describe([(share, 1) for share in taken])[f"p{PERCENTILE}"]
    if by == "ttft_p95":
        return describe([(one.ttft_ms, 1) for one in served])["p95"]
    return describe([(one.e2e_ms, 1) for one in served])["mean"]
