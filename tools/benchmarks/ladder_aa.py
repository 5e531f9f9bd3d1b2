"""How often a comparison of equal engines names a winner, by simulation of the machine's noise.

Noise of a run's figure: a drift, AR(1) with correlation 0.95 and a standard deviation of 10 %; 3 % of its own; and in
5 % of runs half as much again. Whatever is named a winner is a false alarm.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from statistics import mean, median, stdev

from engine_lab.shared.pairs import before_first
from engine_lab.shared.statistics import Estimate, hodges_lehmann, wilson

CORRELATION, DRIFT, OWN, SPIKE, SPIKES = 0.95, 0.10, 0.03, 0.5, 0.05
T_95 = {6: 2.571, 10: 2.262, 20: 2.093, 40: 2.023}
"""Student's t at 95 %, two-sided, of n - 1 degrees of freedom."""


def noise(rng: random.Random, runs: int) -> list[float]:
    """Logarithms of a figure of ``runs`` consecutive runs."""
    drift, found = rng.gauss(0, DRIFT), []
    for _ in range(runs):
        drift = CORRELATION * drift + rng.gauss(0, DRIFT * math.sqrt(1 - CORRELATION**2))
        spike = math.log1p(SPIKE) if rng.random() < SPIKES else 0.0
        found.append(drift + rng.gauss(0, OWN) + spike)
    return found


def abba(rng: random.Random, pairs: int) -> list[float]:
    """Log ratios of pairs in the ladder's order."""
    values = noise(rng, 2 * pairs)
    order = before_first(str(rng.randrange(1 << 30)), pairs)
    return [(values[2 * i + 1] - values[2 * i]) * (1 if first else -1) for i, first in enumerate(order)]


def blocks(rng: random.Random, pairs: int) -> list[float]:
    """The same with all runs of one side first."""
    values = noise(rng, 2 * pairs)
    return [b - a for a, b in zip(values[:pairs], values[pairs:])]


def t_alarm(differences: list[float]) -> bool:
    return abs(mean(differences)) > T_95[len(differences)] * stdev(differences) / math.sqrt(len(differences))


def hl_alarm(differences: list[float]) -> bool:
    return hodges_lehmann(differences).excludes(0.0)


def peeking_alarm(differences: list[float]) -> bool:
    """Looked at after each pair from the sixth on, and stopped at the first winner."""
    return any(hl_alarm(differences[:n]) for n in range(6, len(differences) + 1))


WAYS: tuple[tuple[str, int, Callable[[random.Random, int], list[float]], Callable[[list[float]], bool]], ...] = (
    ("ABBA pairs, Hodges-Lehmann", 6, abba, hl_alarm),
    ("ABBA pairs, Hodges-Lehmann", 10, abba, hl_alarm),
    ("ABBA pairs, Hodges-Lehmann", 20, abba, hl_alarm),
    ("ABBA pairs, t", 10, abba, t_alarm),
    ("all A then all B, t", 10, blocks, t_alarm),
    ("ABBA pairs, Hodges-Lehmann, stopped at the first winner of 6 to 40", 40, abba, peeking_alarm),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000, metavar="N", help="comparisons each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, pairs, draw, alarm in WAYS:
        rng = random.Random(f"{options.seed}/{name}/{pairs}")
        drawn = [draw(rng, pairs) for _ in range(options.repetitions)]
        alarms = sum(map(alarm, drawn))
        share = wilson(alarms, len(drawn))
        half = median(_half_width(hodges_lehmann(one)) for one in drawn)
        print(
            f"{name}, {pairs} pairs: {alarms / len(drawn):.1%} [{share.low:.1%}-{share.high:.1%}] name a winner; "
            f"half width {half:.1%}"
        )


def _half_width(found: Estimate) -> float:
    return (found.interval.high - found.interval.low) / 2 if found.interval else math.inf


if __name__ == "__main__":
    main()
