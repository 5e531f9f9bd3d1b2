"""What a simulated plugin set starts from: each assumption, its value in words, and where it is from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.contracts.step_cost import DraftCost
from engine_lab.shared.simulation.calibration import Calibration
from engine_lab.shared.simulation.measured import acceptance_of, mean_acceptance, overheads_of
from engine_lab.shared.simulation.plans import Resolved
from engine_lab.shared.simulation.spec import ASSUMED_ACCEPTANCE, Drafts, Overheads
from engine_lab.shared.simulation.trace import TraceRequest

Origin = Literal["measured", "estimated", "given", "assumed", "unknown"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """``estimated``: by the code that serving starts with; ``unknown``: left out of the figures."""

    name: str
    origin: Origin
    words: str


def load_of(trace: Sequence[TraceRequest], rate: float | None, rate_scale: float) -> Iterator[Assumption]:
    arrivals = "those of the trace" if rate is None else f"{rate:g} a second, at random moments"
    if rate_scale != 1.0:
        arrivals = f"{rate_scale:g} times as many a second as in the trace"
    yield Assumption("arrivals", "given", f"{arrivals}; outputs have the lengths of the trace")
    if any(request.block_hashes for request in trace):
        yield Assumption("shared prefixes", "given", "whole blocks, as the trace has them")
    else:
        yield Assumption("shared prefixes", "unknown", "the trace does not say: no prompt is cached")


def steps_of(calibration: Calibration, drafting: bool) -> Iterator[Assumption]:
    cost = calibration.step_cost
    most = cost.largest
    seen = f"{cost.num_samples:,} steps of at most {most.num_rows} rows and {most.num_tokens:,} tokens"
    source = f" ({calibration.measured_on})" if calibration.measured_on else ""
    yield Assumption("steps", "measured", seen + source if most.num_rows else f"{cost.num_samples:,} steps{source}")
    yield Assumption("gap between steps", "measured", f"{cost.gap_ms:.2f} ms")
    if drafting and most.num_drafts:
        yield Assumption(
            "steps with drafts", "measured", f"{cost.per_draft_ms:.3f} ms for each draft, up to {most.num_drafts}"
        )
    elif drafting:
        yield Assumption("steps with drafts", "assumed", "none was measured: a draft costs what a prompt token does")


def overheads_for(calibration: Calibration, trace: Sequence[TraceRequest]) -> tuple[Overheads, Assumption]:
    """Of the API process: those of the calibration, else of the trace."""
    found, source = calibration.overheads, "with the steps"
    if found is None:
        found, source = overheads_of(trace), "in the trace"
    if found is None:
        words = "receiving, tokenizing and delivering take no time: TTFT and E2E are too short by that"
        return Overheads(), Assumption("api", "unknown", words)
    words = (
        f"{found.receive_ms:.2f} ms a request, {found.tokenize_us:.1f} us a prompt token, {found.deliver_ms:.2f} ms "
        f"until a token is delivered: {source}"
    )
    return found, Assumption("api", "measured", words)


def drafts_for(
    resolved: Resolved, calibration: Calibration, trace: Sequence[TraceRequest], given: float | None
) -> tuple[Drafts | None, list[Assumption]]:
    """``trace``: of requests that this drafter has served, or empty; ``given``: the acceptance."""
    if resolved.drafting is None:
        return None, []
    name, cost = resolved.plan.choice("drafter").name, calibration.drafts
    per_request: Mapping[int, float] = {}
    if given is not None:
        known = Assumption("acceptance", "given", f"{given:.0%} of drafts whose predecessors were accepted")
        cost = _accepting(cost, (given,))
    elif per_request := acceptance_of(trace):
        share = mean_acceptance(trace)
        words = f"request by request, {share:.0%} of drafts whose predecessors were accepted: in the trace"
        known, cost = Assumption("acceptance", "measured", words), _accepting(cost, (share,))
    elif cost is not None and cost.acceptance:
        shares = " ".join(f"{share:.0%}" for share in cost.acceptance)
        known = Assumption("acceptance", "measured", f"by position in a chain {shares}: with the steps")
    else:
        words = f"{ASSUMED_ACCEPTANCE:.0%} of drafts; a trace of drafter={name} tells, or --acceptance"
        known = Assumption("acceptance", "assumed", words)
    return Drafts(resolved.drafting, cost or DraftCost(), per_request), [known, _drafting(name, calibration.drafts)]


def _accepting(cost: DraftCost | None, acceptance: tuple[float, ...]) -> DraftCost:
    return replace(cost or DraftCost(), acceptance=acceptance)


def _drafting(name: str, cost: DraftCost | None) -> Assumption:
    if cost is None:
        return Assumption(f"drafter={name}", "unknown", "proposing takes no time: none was measured with these steps")
    words = (
        f"{cost.base_ms:.2f} ms a step, {cost.per_token_ms * 1e3:.1f} us a token, {cost.per_draft_ms:.3f} ms for each "
        f"draft of the longest chain and {cost.per_row_draft_ms:.3f} ms for each draft; {cost.num_samples:,} steps"
    )
    share = (
        "" if cost.proposes > 0.995 else f"; it has drafts for {cost.proposes:.0%} of the requests it is asked about"
    )
    return Assumption(f"drafter={name}", "measured", words + share)
