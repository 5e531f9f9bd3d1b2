"""``engine plan --live``: how far a prediction is from what a running server measures, and whether it becomes worse."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from engine.assembly.plan import EnginePlan
from engine.contracts.command import FAILED, OK
from engine.contracts.events import DEFAULT_ENGINE
from engine.loop.step_errors import StepCostReport
from engine.native.folder import unusable, user_folder
from engine_lab.plan.planning import Answer
from engine_lab.plan.report import show, steps_of
from engine_lab.plan.served import MOST, otherwise, requests_of
from engine_lab.shared.live import LiveEngine, LiveError, plan_of
from engine_lab.shared.simulation.trace import TraceRequest

SCHEMA = "engine-plan-baseline/1"
POINTS, RELATIVE = 2.0, 1.1
"""An error that is so many points and so many times higher than before is an alarm."""
FAR_OFF = 50.0
"""A median that is so many percent off is no prediction."""
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Scored:
    """One figure. ``samples``: requests or tokens that it was measured from; 0: of none."""

    name: str
    predicted: float
    measured: float
    samples: int = 0

    @property
    def error(self) -> float:
        """In percent of what was measured."""
        return abs(self.predicted / self.measured - 1.0) * 100.0


SIMULATED = ("scheduler", "kv_allocator", "drafter")
"""Slots whose settings change what is predicted."""


class Baseline(msgspec.Struct, frozen=True):
    """Errors of an earlier prediction, in percent."""

    schema: str
    errors: dict[str, float]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server says of one of its engines: as its routes answer."""

    plan: Any
    latency: Any
    requests: list[TraceRequest]
    step_cost: StepCostReport | None = None
    """``None``: it has measured no step."""


async def observed(url: str, api_key: str | None, name: str | None = None) -> Observed:
    """``name``: the id of the engine, ``None``: the first one. Raises :class:`LiveError`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        engine, said = await LiveEngine(session, url, api_key).chosen(name)
        if said:
            print(f"engine plan: {said}", file=sys.stderr)
        plan, latency = await plan_of(engine), await engine.json("/engine/latency")
        listed = await engine.json(f"/engine/requests?count={MOST}")
        stats = await engine.json("/engine/stats") or {}
        found = stats.get("step_cost")
        cost = None if found is None else msgspec.convert(found, StepCostReport)
        return Observed(
            plan, latency, requests_of(listed["requests"]), cost if cost and cost.cost.num_samples else None
        )


def served_plan(seen: Observed) -> EnginePlan:
    """Raises :class:`LiveError` for one of another version."""
    try:
        return EnginePlan.from_json(msgspec.json.encode(seen.plan["plan"]))
    except (KeyError, msgspec.ValidationError) as error:
        raise LiveError(f"the server's plan is of another version: {error}; give the overrides that it runs") from error


def scores(answer: Answer, plan: Any, latency: Any) -> list[Scored]:
    """Every figure that both have. Raises ``ValueError`` where the server runs something else than was planned."""
    if others := list(_differences(answer, plan["plan"])):
        raise ValueError(f"the server runs something else: {'; '.join(others)}. Plan the same")
    found = [Scored("KV tokens", float(answer.sizing.kv_tokens), float(plan["engine"]["kv_tokens"]))]
    found.append(Scored("weights, bytes", float(answer.sizing.weights), float(plan["engine"]["weights_bytes"])))
    if (prediction := answer.prediction) is not None:
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            predicted, measured = getattr(prediction, name), latency[name]
            for key in ("p50", "p95", "p99"):
                if predicted[key] is not None and measured[key]:
                    found.append(Scored(f"{name} {key}", predicted[key], measured[key], measured["count"]))
    return found


def _differences(answer: Answer, plan: Mapping[str, Any]) -> Iterator[str]:
    mine = answer.sizing.plan
    if plan["model"]["name"] != mine.model.name:
        yield f"model {plan['model']['name']}, planned is {mine.model.name}"
    if (replicas := plan["settings"]["fleet"]["replicas"]) != mine.settings.fleet.replicas:
        yield f"fleet.replicas={replicas}, planned is {mine.settings.fleet.replicas}"
    for slot, choices in mine.slots.items():
        found = plan["slots"].get(slot, ())
        theirs = [choice["name"] for choice in found]
        if slot != "exporter" and theirs != [choice.name for choice in choices]:
            yield f"{slot}={','.join(theirs)}, planned is {','.join(choice.name for choice in choices)}"
        elif slot in SIMULATED:
            for key, value in msgspec.to_builtins(choices[0].config).items():
                if (other := found[0]["config"].get(key)) != value:
                    yield f"{slot}.{key}={other}, planned is {value}"


def alarms(now: Sequence[Scored], before: Mapping[str, float]) -> list[str]:
    """Names of figures whose error has risen by :data:`POINTS` and :data:`RELATIVE`."""
    return [
        each.name
        for each in now
        if each.name in before
        and each.error >= before[each.name] + POINTS
        and each.error >= before[each.name] * RELATIVE
    ]


def baseline_file(answer: Answer, url: str, engine: str = DEFAULT_ENGINE) -> Path:
    """One for each engine, plan and load. Raises ``ValueError`` where nothing can be kept."""
    folder = user_folder("plan")
    if reason := unusable(folder):
        raise ValueError(f"{reason}; give --baseline FILE")
    question = answer.question
    trace = "served" if question.load_is_served else msgspec.json.encode(question.trace).decode()
    where = url if engine == DEFAULT_ENGINE else f"{url} {engine}"
    parts = [where, answer.device, str(question.calibration), trace, *question.overrides]
    return folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"


def read_baseline(file: Path) -> Mapping[str, float]:
    """Empty without a file. Raises ``ValueError`` for one of another kind."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Baseline)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{file}: no baseline of engine plan ({error}); remove it or name another --baseline"
        ) from error
    if found.schema != SCHEMA:
        raise ValueError(f"{file}: schema {found.schema!r}, expected {SCHEMA!r}")
    return found.errors


def score(flags: argparse.Namespace, answer: Answer, seen: Observed) -> int:
    """Compare, print, and keep the errors unless one is an alarm: the old ones stay while it lasts. Returns the exit
    status. Raises :class:`LiveError` and ``ValueError``."""
    found = scores(answer, seen.plan, seen.latency)
    if not any(each.samples for each in found):
        load = answer.question.load
        todo = "" if load is None else f": {load.bench(len(answer.question.trace), answer.question.seed)}"
        raise LiveError(f"{flags.live} has served nothing within its window; send the load first{todo}")
    file = Path(flags.baseline) if flags.baseline is not None else baseline_file(answer, flags.live, seen.plan["id"])
    before = read_baseline(file)
    worse, other = alarms(found, before), otherwise(answer.question.trace, seen.requests)
    off = [] if other else [each.name for each in found if each.name.endswith("p50") and each.error > FAR_OFF]
    if not (worse or other or off):
        try:
            file.write_bytes(msgspec.json.encode(Baseline(SCHEMA, {each.name: each.error for each in found})))
        except OSError as error:
            raise ValueError(
                f"{file}: the errors cannot be kept ({error.strerror}); name another --baseline"
            ) from error
    _show(found, before, worse, other, flags.json)
    if off:
        print(f"engine plan: more than {FAR_OFF:g} % off: {', '.join(off)}", file=sys.stderr)
    if not flags.json:
        Console().print(steps_of(answer), style="dim", markup=False)
    return FAILED if worse or other or off else OK


def _show(found: Sequence[Scored], before: Mapping[str, float], worse: Sequence[str], load: str, as_json: bool) -> None:
    if as_json:
        rows = [msgspec.to_builtins(each) | {"error_percent": each.error} for each in found]
        told = {"schema": "engine-plan-live/1", "figures": rows, "baseline": before, "alarms": worse, "load": load}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=1).decode() + "\n")
        return
    table = Table(title="prediction against the running server", title_justify="left")
    for column in ("", "predicted", "measured", "samples", "error", "before"):
        table.add_column(column, justify="right" if column else "left")
    for each in found:
        then = f"{before[each.name]:.1f} %" if each.name in before else "-"
        cells = [
            show(each.predicted),
            show(each.measured),
            f"{each.samples:,}" if each.samples else "-",
            f"{each.error:.1f} %",
            then,
        ]
        table.add_row(each.name, *cells, style="bold red" if each.name in worse else "")
    Console().print(table)
    if load:
        print(
            f"the load that was served is another one: {load}; give it as --workload, or leave it out", file=sys.stderr
        )
    if worse:
        print(f"worse by {POINTS:g} points and {RELATIVE - 1:.0%} or more: {', '.join(worse)}", file=sys.stderr)
