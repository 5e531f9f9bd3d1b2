"""In which order the two sides of paired runs are made."""

from __future__ import annotations

import random


def before_first(seed: str, pairs: int) -> list[bool]:
    """For each pair of runs, whether the side ``before`` runs first: ABBA or BAAB, drawn for every two pairs, so that a
    steady drift of the machine meets both sides alike."""
    rng = random.Random(seed)
    order: list[bool] = []
    while len(order) < pairs:
        first = rng.random() < 0.5
        order += [first, not first]
    return order[:pairs]
