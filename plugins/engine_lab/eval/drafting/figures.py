"""What the runs of an engine say next to those of the engine without drafts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine_lab.eval.drafting.worker import Run, added

FEWEST_DRAFTS = 0.1
"""Draft tokens a decode step, on average, for a cost of each."""
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantiles of Student's t at 97.5 %, for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine at one batch size. A decode step is one request in one step; milliseconds are medians over passes."""

    decode_steps: int
    tokens_per_step: float
    """tau: the model's own token included, steps without drafts too."""
    draft_ms: float
    verify_ms: float
    rest_ms: float
    """What a decode step takes beside drafting and verifying."""
    ms_per_token: float
    """That a request waits for a token."""
    speed_up: float | None = None
    """Median over pairs of the time per token without drafts, divided by this one's."""
    slowdown: float | None = None
    """Mean over pairs of the time per token, divided by that without drafts."""
    slowdown_bound: float | None = None
    """Upper end of its 95 % confidence interval; ``None`` for a single pair."""
    chains: int = 0
    """Decode steps with drafts."""
    drafted: int = 0
    accepted: int = 0
    acceptance: tuple[float | None, ...] = ()
    """By position: share of drafts accepted, of those whose predecessors were all accepted."""
    num_draft_tokens: float | None = None
    """k: mean draft tokens a decode step, steps without any counting as 0."""
    drafting_cost: float | None = None
    """k*c: time of the drafter in a decode step, in device time of a step without drafts."""
    draft_cost: float | None = None
    """c: that for each draft; ``None`` where hardly any step has drafts, and most of it is no draft's."""
    verify_cost: float | None = None
    """v: device time of a step, in that of a step without drafts."""
    ideal: float | None = None
    """``tau / (k * c + v)``: the speed-up if a decode step were nothing but drafting and verifying."""
    reached: float | None = None
    """``speed_up / ideal``"""


def plain_figures(runs: Sequence[Run]) -> Figures:
    """Of the engine without drafts, from its passes. Raises ``ValueError`` where no answer had a second token."""
    if not all(run.decode_steps for run in runs):
        raise ValueError("no answer has more than one token")
    draft, verify, rest = (statistics.median(part) for part in zip(*map(_parts, runs), strict=True))
    return Figures(
        decode_steps=sum(run.decode_steps for run in runs),
        tokens_per_step=sum(run.tokens for run in runs) / sum(run.decode_steps for run in runs),
        draft_ms=draft,
        verify_ms=verify,
        rest_ms=rest,
        ms_per_token=statistics.median(map(ms_per_token, runs)),
    )


def drafted_figures(runs: Sequence[Run], plain: Sequence[Run]) -> Figures:
    """Of an engine that drafts: pass for pass beside the one that does not."""
    own, step_ms = plain_figures(runs), plain_figures(plain).verify_ms
    slowdowns = [ms_per_token(a) / ms_per_token(b) for a, b in zip(runs, plain, strict=True)]
    speed_up = statistics.median(1.0 / ratio for ratio in slowdowns)
    total = Run()
    for run in runs:
        total.drafted += run.drafted
        total.chains += run.chains
        total.tried, total.accepted_at = added(total.tried, run.tried), added(total.accepted_at, run.accepted_at)
    num_draft_tokens = total.drafted / own.decode_steps
    drafting, verify = own.draft_ms / step_ms, own.verify_ms / step_ms
    ideal = own.tokens_per_step / (drafting + verify)
    accepted_at = [*total.accepted_at, *[0] * (len(total.tried) - len(total.accepted_at))]
    return Figures(
        decode_steps=own.decode_steps,
        tokens_per_step=own.tokens_per_step,
        draft_ms=own.draft_ms,
        verify_ms=own.verify_ms,
        rest_ms=own.rest_ms,
        ms_per_token=own.ms_per_token,
        speed_up=speed_up,
        slowdown=statistics.fmean(slowdowns),
        slowdown_bound=upper_bound(slowdowns),
        chains=total.chains,
        drafted=total.drafted,
        accepted=sum(accepted_at),
        acceptance=tuple(a / b if b else None for a, b in zip(accepted_at, total.tried, strict=True)),
        num_draft_tokens=num_draft_tokens,
        drafting_cost=drafting,
        draft_cost=drafting / num_draft_tokens if num_draft_tokens >= FEWEST_DRAFTS else None,
        verify_cost=verify,
        ideal=ideal,
        reached=speed_up / ideal,
    )


def ms_per_token(run: Run) -> float:
    """What a request waited for each of its tokens after the first."""
    return run.wall_ms / run.tokens


def _parts(run: Run) -> tuple[float, float, float]:
    """Milliseconds of a decode step: in the drafter, verifying, and the rest."""
    draft, verify = run.draft_ms / run.decode_steps, run.verify_ms / run.decode_steps
    return draft, verify, run.wall_ms / run.decode_steps - draft - verify


def upper_bound(ratios: Sequence[float]) -> float | None:
    """Upper end of the 95 % confidence interval (two-sided, Student's t) of the mean; ``None`` for one ratio."""
    freedom = len(ratios) - 1
    if freedom < 1:
        return None
    # Beyond the table: the first term of t's expansion around the normal quantile.
    t = T_975[freedom - 1] if freedom <= len(T_975) else 1.960 + 2.372 / freedom
    return statistics.fmean(ratios) + t * statistics.stdev(ratios) / math.sqrt(len(ratios))
