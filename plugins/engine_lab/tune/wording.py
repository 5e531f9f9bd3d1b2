"""How a proof is put into words, on the screen and in the preset alike."""

from __future__ import annotations

from typing import Any

from engine_lab.sweep.figures import BY_KEY, figure_of
from engine_lab.sweep.record import Experiment
from engine_lab.sweep.screen import shown
from engine_lab.sweep.wording import interval
from engine_lab.tune.proof import BY


def evidence(experiment: Experiment, proof: dict[str, Any]) -> list[str]:
    """What fresh runs say, a line each."""
    chosen = experiment.candidates[proof["chosen"]]
    lines = [f"{chosen.name}, beside the baseline: {proof['passes']} pairs of runs, intervals of 95 %"]
    for key, ratio in proof["figures"].items():
        figure = figure_of(key)
        lines.append(
            f"{figure.label}: {shown(ratio['after'])} instead of {shown(ratio['before'])} {figure.unit}, "
            f"ratio {interval(ratio)}"
        )
    for name, kept in proof["kept"].items():
        lines.append(
            f"SLO: {kept['verdict']} with {'the baseline' if name != chosen.name else 'this set'} "
            f"({kept['share']:.2f} [{kept['low']:.2f}-{kept['high']:.2f}] of its limits at P95 of requests)"
        )
    if chosen.loss is not None:
        lines.append(f"loss of quality: perplexity {chosen.loss:+.2%} ({experiment.quality})")
    lines += [
        f"{name} kept the SLO up to {most:.3g} times the load" if most else f"{name} does not keep the SLO at this load"
        for name, most in proof.get("headroom", {}).items()
    ]
    return [
        *lines,
        *([line_brings(one) for one in proof["lines"]] or ["it differs in one line, which brings all of this"]),
    ]


def line_brings(one: dict[str, Any]) -> str:
    """What one line alone does beside the others."""
    if one["refused"]:
        return f"{one['line']}: the others are refused without it ({one['refused']})"
    if (ratio := one["ratio"]) is None:
        return f"{one['line']}: not measured"
    said = "brings" if ratio["high"] < 1.0 else "costs" if ratio["low"] > 1.0 else "no effect shown,"
    return f"{one['line']}: {said} a factor of {interval(ratio)} in {BY_KEY[BY].label}, beside the other lines"
