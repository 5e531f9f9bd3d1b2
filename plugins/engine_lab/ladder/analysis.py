"""From a ladder's runs to the rows of its report: plain data, the same on the screen, on the page and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from engine_lab.ladder.case_study import EXPECTED, Expectation
from engine_lab.ladder.comparisons import ADDED, ALL, SAME
from engine_lab.ladder.figures import FIGURES, Figure
from engine_lab.ladder.floor import floors
from engine_lab.ladder.record import Ladder, Measured, Run, Survey
from engine_lab.ladder.requests import max_tokens
from engine_lab.ladder.rungs import P99, Form, form_of
from engine_lab.ladder.survey import divergence
from engine_lab.shared.statistics import Estimate, paired_difference, paired_ratio, quantile_interval, wilson

BETTER, WORSE, UNDECIDED, UNFINISHED = "better", "worse", "no winner", "unfinished"
Row = dict[str, Any]


def summarise_ladder(ladder: Ladder) -> dict[str, Any]:
    """Rows and what is to be known beside them."""
    rows = [row(ladder, measured) for measured in ladder.comparisons if measured.kind != SAME]
    judged = [found for one in rows for found in one["figures"].values() if found["verdict"] != UNFINISHED]
    level = ladder.options["level"]
    runs = [run for one in ladder.comparisons for pair in one.pairs for run in pair]
    lags = [run.client_lag_ms for run in runs if run.client_lag_ms is not None]
    return {
        "rows": rows,
        "refused": [{"name": survey.rung, "reason": survey.refused} for survey in ladder.surveys if survey.refused],
        "level": level,
        "intervals": len(judged),
        "expected_false": len(judged) * (1 - level),
        "same": same_summary(ladder),
        "max_tokens": observed_limit(ladder.output_lengths),
        "failed_requests": sum(run.failed for run in runs),
        "client_lag_ms": median(lags) if lags else None,
    }


def row(ladder: Ladder, measured: Measured) -> Row:
    """One comparison."""
    changed = [word for word in measured.after if word not in measured.before] if measured.kind != ALL else []
    expectation = expected(ladder, measured)
    survey = survey_of(ladder, measured) if measured.kind == ADDED else None
    return {
        "kind": measured.kind,
        "name": measured.name,
        "changes": changed,
        "replaces": [word for word in measured.before if word not in measured.after] if changed else [],
        "refused": measured.refused,
        "pairs": len(measured.pairs),
        "planned": ladder.options["pairs"],
        "figures": {} if measured.refused else compared(ladder, measured),
        "cached": cached_share([after for _, after in measured.pairs]),
        "acceptance": mean([after.acceptance for _, after in measured.pairs]),
        "answer_tokens": [mean_answer([side[i] for side in measured.pairs]) for i in (0, 1)],
        "outputs": outputs_compared(ladder, measured),
        "facts": survey.facts if survey else {},
        "users": users(survey, measured, ladder.options["shared_prefix"]) if survey else None,
        "floors": floors(ladder, survey, [after for _, after in measured.pairs]) if survey else {},
        "notes": list(expectation.notes) if expectation else [],
    }


def expected(ladder: Ladder, measured: Measured) -> Expectation | None:
    """What the case study says of a comparison; of all rungs only where its own are among them."""
    if measured.kind == ALL and not EXPECTED.keys() - {measured.name} <= {rung.name for rung in ladder.rungs}:
        return None
    return EXPECTED.get(measured.name)


def compared(ladder: Ladder, measured: Measured) -> dict[str, dict[str, Any]]:
    """By key of a figure: medians of both sides, the estimate, and whether there is a winner."""
    expectation = expected(ladder, measured)
    found = {}
    for figure in FIGURES:
        pairs = [(before.figures.get(figure.key), after.figures.get(figure.key)) for before, after in measured.pairs]
        before = [a for a, b in pairs if a is not None and b is not None]
        after = [b for a, b in pairs if a is not None and b is not None]
        if not before or (figure.is_ratio and min(*before, *after) <= 0):
            continue
        finished = len(before) == ladder.options["pairs"]
        compare = paired_ratio if figure.is_ratio else paired_difference
        estimate = compare(before, after, ladder.options["level"])
        interval = estimate.interval if finished else None
        found[figure.key] = {
            "before": median(before),
            "after": median(after),
            "estimate": estimate.value,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
            "verdict": verdict(figure, estimate) if finished else UNFINISHED,
            "expected": expectation.ratios.get(figure.key) if expectation else None,
        }
    return found


def verdict(figure: Figure, estimate: Estimate) -> str:
    """No winner is named while the interval holds the value of no change."""
    none = 1.0 if figure.is_ratio else 0.0
    if not estimate.excludes(none):
        return UNDECIDED
    return BETTER if (estimate.value < none) == figure.is_ratio else WORSE


def survey_of(ladder: Ladder, measured: Measured) -> Survey | None:
    """Of the engine with this rung: known of the rungs that were added."""
    return next((s for s in ladder.surveys if s.words == measured.after and not s.refused), None)


def outputs_compared(ladder: Ladder, measured: Measured) -> dict[str, Any] | None:
    """Greedy outputs beside those of the rung below; ``None`` where prompts differ, or none were asked for."""
    before = next((s for s in ladder.surveys if s.words == measured.before), None)
    after = survey_of(ladder, measured)
    if measured.kind != ADDED or before is None or after is None or not after.outputs:
        return None
    old, new = form_of(before.words), form_of(after.words)
    if old.static_first != new.static_first:
        return None
    pairs = list(zip(before.outputs, after.outputs, strict=True))
    found = [divergence(a, b, may_be_cut=old.max_tokens != new.max_tokens) for a, b in pairs]
    different = [one for one in found if one is not None]
    first = min(different, key=lambda one: one[0], default=None)
    return {
        "compared": len(pairs),
        "equal": len(pairs) - len(different),
        "first_token": first[0] if first else None,
        "margin": first[1] if first else None,
        "largest_margin": max((one[1] for one in different if one[1] is not None), default=None),
    }


def users(survey: Survey, measured: Measured, shared: float) -> dict[str, float] | None:
    """Requests of this workload's mean size that the KV cache keeps at once; with a static prefix first, the shared
    part is kept once."""
    runs = [after for _, after in measured.pairs if after.prompt_tokens and after.output_tokens]
    kv_tokens = survey.facts.get("kv_tokens")
    if not runs or not kv_tokens:
        return None
    requests = sum(run.requests - run.failed for run in runs)
    prompt = sum(run.prompt_tokens or 0 for run in runs) / requests
    output = sum(run.output_tokens or 0 for run in runs) / requests
    once = prompt * shared if form_of(survey.words).static_first else 0.0
    return {"apart": kv_tokens / (prompt + output), "sharing": (kv_tokens - once) / (prompt - once + output)}


def cached_share(runs: Sequence[Run]) -> float | None:
    """Of all prompt tokens, those that were found in the prefix cache."""
    known = [(run.cached_tokens, run.prompt_tokens) for run in runs]
    total = sum(prompt or 0 for _, prompt in known)
    return sum(cached or 0 for cached, _ in known) / total if total else None


def mean_answer(runs: Sequence[Run]) -> float | None:
    """Tokens of an answer."""
    requests = sum(run.requests - run.failed for run in runs)
    return sum(run.output_tokens or 0 for run in runs) / requests if requests else None


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def same_summary(ladder: Ladder) -> dict[str, Any] | None:
    """Of finished A/A comparisons, how many named a winner, by figure."""
    finished = [m for m in ladder.comparisons if m.kind == SAME and len(m.pairs) == ladder.options["pairs"]]
    if not finished:
        return None
    judged = [compared(ladder, measured) for measured in finished]
    alarms = {}
    for figure in FIGURES:
        verdicts = [one[figure.key]["verdict"] for one in judged if figure.key in one]
        if verdicts:
            wrong = sum(one != UNDECIDED for one in verdicts)
            share = wilson(wrong, len(verdicts))
            alarms[figure.key] = {"named": wrong, "of": len(verdicts), "low": share.low, "high": share.high}
    none = sum(all(found["verdict"] == UNDECIDED for found in one.values()) for one in judged)
    return {"comparisons": len(finished), "without_any_winner": none, "by_figure": alarms}


def observed_limit(lengths: Sequence[int]) -> dict[str, Any] | None:
    """The P99 of observed output lengths, with its interval, where there are enough for one."""
    limit = max_tokens(Form(max_tokens=P99), lengths)
    interval = quantile_interval(lengths, 0.99) if lengths else None
    if limit is None:
        return None
    return {
        "p99": limit,
        "observed": len(lengths),
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
    }
