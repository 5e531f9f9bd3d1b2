"""From a question to a page of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from engine.assembly.plan import EnginePlan
from engine.contracts.model import DeviceFacts
from engine.loop.step_errors import StepCostReport
from engine_lab.bench.slo import Slo
from engine_lab.plan.candidates import CANDIDATES, LAYOUTS, LENGTHS, SMALLER, Candidate, combined
from engine_lab.plan.cost import NONE, Cost, estimated, saved
from engine_lab.plan.device import efficiency_of, facts_of, flops_key, probed
from engine_lab.plan.figure import NOT_GIVEN, UNKNOWN, Figure
from engine_lab.plan.predict import HEADROOM, Prediction, most_rate, predict
from engine_lab.plan.workload import PlannedLoad
from engine_lab.shared.errors import EvalError
from engine_lab.shared.estimates.devices import DataSheet, Device
from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.simulation.measured import overheads_of
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.sizing import Sizing, measured_step_cost, size_plan, size_resolved

BEST = 3
TRIAL, FEWER = 100, 30
"""Requests that overrides are compared by; and without ``--thorough``."""
FEW_LAYOUTS = 2
"""Without ``--thorough``."""
LEAST_GAIN = 1.02
"""Gains below it are not worth an override."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned. ``card``: ``None`` is the machine the command runs on; ``price``: USD per hour of one device."""

    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...]
    card: DataSheet | None
    calibration: Path | None
    trace: tuple[TraceRequest, ...]
    load: PlannedLoad | None
    """What ``trace`` was made of; ``None``: it is a recorded one."""
    slo: Slo | None
    price: float | None
    seed: int
    thorough: bool = False
    """Other overrides and layouts are simulated, too."""
    served: EnginePlan | None = None
    """What a server runs, instead of ``overrides``."""
    step_cost: StepCostReport | None = None
    """Of its latest steps."""
    load_is_served: bool = False
    """``trace`` is what that server has served."""


@dataclass(frozen=True, slots=True)
class Option:
    """A plan with further overrides, under the same load."""

    overrides: tuple[str, ...]
    trade: str
    devices: int = 1
    gain: float | None = None
    """E2E before / after, on average; infinite: it fits, and the plan does not. ``None``: it cannot be had."""
    prediction: Prediction | None = None
    concurrency: int = 0
    usd_per_million: Figure = UNKNOWN
    reason: str = ""
    """Why it cannot be had."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that the page shows."""

    question: Question
    sizing: Sizing
    device: str
    cost: Cost
    request_tokens: int
    """Of the longest request."""
    shared_tokens: int
    """That all requests have in common."""
    prediction: Prediction | None
    """``None``: it does not fit."""
    usd_per_million: Figure
    """Of output tokens at the stated rate."""
    usd_per_hour: Figure
    """Of one device."""
    most_rate: Figure = UNKNOWN
    """Requests per second, with the limits kept if there are any."""
    replicas: Figure = UNKNOWN
    fixes: tuple[Option, ...] = ()
    """With which it fits, where it does not: what computes the same first."""
    options: tuple[Option, ...] = ()
    """The best, best first."""
    layouts: tuple[Option, ...] = ()
    no_options: str = ""
    """Why none were looked for, or not all; empty: they were."""


class Planner:
    """Answers one question."""

    def __init__(self, question: Question, say: Callable[[str], None] = lambda text: None) -> None:
        """``say``: is told what is being done."""
        self._question, self._say = question, say
        self._facts: DeviceFacts | None = None if question.card is None else facts_of(question.card)
        self._probed: Device | None = None
        price = question.price
        if price is None and question.card is not None:
            price = question.card.figures.get("usd_per_hour")
        has_price = price is not None or question.card is not None
        self._price = Figure.of(price, "stated") if has_price else NOT_GIVEN

    def brief(self) -> Answer:
        """What the plan itself comes to, without looking for anything better. Raises ``ValueError`` for what the user
        should change."""
        question, sizing = self._question, self._size(())
        cost = self._cost(sizing)
        if sizing.blocks:
            self._say(f"{len(question.trace)} requests")
        prediction = self._predict(sizing, cost)
        return Answer(
            question,
            sizing,
            sizing.plan.device.name if question.card is None else question.card.name,
            cost,
            self._longest(),
            self._shared(),
            prediction,
            self._usd(prediction, sizing.plan.layout.size),
            self._price,
        )

    def answer(self) -> Answer:
        """The whole page. Raises ``ValueError`` as :meth:`brief` does."""
        found, question = self.brief(), self._question
        rate = NOT_GIVEN if question.load is None else UNKNOWN
        if found.sizing.blocks and question.load is not None:
            self._say("the highest rate")
            count = min(len(question.trace), TRIAL)
            most = most_rate(found.sizing, found.cost, question.load, question.slo, count, question.seed)
            rate = Figure(most, "simulated")
        found = replace(found, most_rate=rate, replicas=self._replicas(rate))
        if found.sizing.blocks and not question.thorough:
            return replace(found, no_options="--thorough compares overrides and layouts by simulation")
        try:
            guess = self._estimated(found.sizing)
        except EstimateError as error:
            return replace(found, no_options=f"no overrides are compared, for nothing was measured of them: {error}")
        layouts = LAYOUTS if question.card is not None else ()
        if not found.sizing.blocks:
            layouts = layouts if question.thorough else layouts[:FEW_LAYOUTS]
            tried = (*self._lossless(found), *layouts, *SMALLER)
            options, stopped = self._options(tried, None, TRIAL if question.thorough else FEWER)
            return replace(found, fixes=_fitting(options), no_options=stopped)
        # Nothing was measured of other plans, so estimates are compared with estimates.
        before = self._predict(found.sizing, guess, TRIAL)
        options, stopped = self._options(CANDIDATES, before, TRIAL)
        shared, stopped = ([], stopped) if stopped else self._options(layouts, before, TRIAL)
        return replace(found, options=_best(options, before), layouts=tuple(shared), no_options=stopped)

    def _lossless(self, found: Answer) -> tuple[Candidate, ...]:
        """What the refusal suggests that computes the same."""
        return tuple(
            Candidate(each.overrides, each.effect)
            for each in found.sizing.suggestions
            if not each.overrides[0].startswith("quantizer=")
        )

    def _size(self, more: Sequence[str]) -> Sizing:
        question = self._question
        if question.served is not None and not more:
            return size_resolved(question.served)
        return size_plan(combined(question.overrides, more), question.config_dirs, self._facts)

    def _cost(self, sizing: Sizing) -> Cost:
        """What was measured, if anything was."""
        question = self._question
        if question.calibration is not None:
            return saved(question.calibration)
        kept = measured_step_cost(sizing) if question.card is None else None
        latest = question.step_cost or kept
        if latest is None:
            return self._estimated(sizing)
        source = latest.told_with(
            "steps of an engine on this machine" if latest is kept else "the server's latest steps"
        )
        drafts = None if kept is None else kept.drafts
        return Cost(latest.cost, "measured", source, overheads_of(question.trace) or NONE, drafts)

    def _estimated(self, sizing: Sizing) -> Cost:
        question = self._question
        if question.card is not None:
            activations = sizing.plan.quantizer.activations
            device = question.card.device(flops_key(activations, question.card))
        else:
            device = self._probed = self._probed or probed(sizing.plan.device, sizing.plan.dtype)
        return estimated(sizing, device, efficiency_of(sizing.plan.device.kind))

    def _predict(self, sizing: Sizing, cost: Cost, count: int | None = None) -> Prediction | None:
        if sizing.plan.layout.pp > 1:
            raise EvalError(
                f"parallelism.pp={sizing.plan.layout.pp}: pipelines are not simulated; use parallelism.pp=1"
            )
        if not sizing.blocks:
            return None
        return predict(sizing, cost, self._question.trace[:count], self._question.slo, self._question.seed)

    def _longest(self) -> int:
        return max(each.prompt_tokens + each.output_tokens for each in self._question.trace)

    def _shared(self) -> int:
        load = self._question.load
        return 0 if load is None else round(load.shared_prefix * min(r.prompt_tokens for r in self._question.trace))

    def _replicas(self, rate: Figure) -> Figure:
        load = self._question.load
        if load is None:
            return NOT_GIVEN
        if not rate.value:
            return UNKNOWN
        return Figure(ceil(HEADROOM * load.rate / rate.value), rate.origin)

    def _usd(self, prediction: Prediction | None, devices: int) -> Figure:
        if self._price.value is None:
            return self._price
        if prediction is None or not prediction.output_tokens_per_s:
            return UNKNOWN
        return Figure(self._price.value * devices / (prediction.output_tokens_per_s * 3600) * 1e6, "simulated")

    def _options(
        self, candidates: Sequence[Candidate], before: Prediction | None, count: int
    ) -> tuple[list[Option], str]:
        """Each with the first ``count`` requests; after Ctrl-C those that were tried, and that it was so."""
        candidates = [each for each in candidates if not {*each.overrides} <= {*self._question.overrides}]
        found: list[Option] = []
        for number, candidate in enumerate(candidates, 1):
            words = " ".join(candidate.overrides)
            self._say(f"{number} of {len(candidates)}: {words}")
            try:
                found.append(self._option(*self._sized(candidate), before, count))
            except (EstimateError, EvalError) as error:
                found.append(Option(candidate.overrides, candidate.trade, reason=str(error).splitlines()[0]))
            except KeyboardInterrupt:
                return found, f"stopped: {len(found)} of {len(candidates)} overrides and layouts were tried"
        return found, ""

    def _sized(self, candidate: Candidate) -> tuple[Candidate, Sizing]:
        """Where it does not fit but shorter requests would: with their length."""
        sizing = self._size(candidate.overrides)
        for each in sizing.suggestions:
            if each.overrides[0].startswith(LENGTHS):
                shorter = Candidate((*candidate.overrides, *each.overrides), f"{candidate.trade}; {each.effect}")
                return shorter, self._size(shorter.overrides)
        return candidate, sizing

    def _option(self, candidate: Candidate, sizing: Sizing, before: Prediction | None, count: int) -> Option:
        found, devices = self._predict(sizing, self._estimated(sizing), count), sizing.plan.layout.size
        if found is None:
            why = sizing.refusal.splitlines()[0]
            return Option(candidate.overrides, candidate.trade, devices, reason=why)
        trade = candidate.trade
        if found.refused:
            trade += f"; {found.refused} of {min(count, len(self._question.trace))} requests are refused as too long"
        return Option(
            candidate.overrides,
            trade,
            devices,
            float("inf") if before is None else before.mean_e2e_ms / found.mean_e2e_ms,
            found,
            sizing.concurrency(self._longest(), self._shared()),
            self._usd(found, devices),
        )


def _fitting(options: Sequence[Option]) -> tuple[Option, ...]:
    return tuple(each for each in options if each.gain is not None)


def _best(options: Sequence[Option], before: Prediction | None) -> tuple[Option, ...]:
    found = sorted(_fitting(options), key=lambda each: (-_good(each.prediction), -(each.gain or 0.0)))
    worth = [each for each in found if _is_better(each, before)]
    return tuple(worth[:BEST])


def _good(found: Prediction | None) -> float:
    """Share of requests that keep the limits, in whole percent: less is chance."""
    return 0.0 if found is None or found.good_share is None else round(found.good_share, 2)


def _is_better(option: Option, before: Prediction | None) -> bool:
    return _good(option.prediction) > _good(before) or (option.gain or 0.0) >= LEAST_GAIN
