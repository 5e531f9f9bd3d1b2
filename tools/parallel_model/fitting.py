"""Least squares: what no data sheet states, from published decode speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from tools.parallel_model.anchors import Anchor
from tools.parallel_model.models import graph

from engine.contracts.ops import Experts
from engine.models.layout import Layout
from engine_lab.shared.estimates.collectives import collectives
from engine_lab.shared.estimates.devices import device
from engine_lab.shared.estimates.efficiency import Efficiency
from engine_lab.shared.estimates.steps import Estimate

IDEAL = Efficiency(bandwidth=1.0, layer_us=0.0, flops=1.0)


def estimate(anchor: Anchor, efficiency: Efficiency) -> Estimate:
    """Of what was measured."""
    card = device(anchor.device)

    def units(spec: Any, axis: str) -> int | None:
        return None if anchor.whole_head and spec.kind == "head" else 1

    return Estimate(
        graph(anchor.model),
        Layout(tp=anchor.tp),
        card,
        collectives(anchor.method, card.link),
        efficiency,
        anchor.widths,
        units=units,
    )


def estimated_ms(anchor: Anchor, efficiency: Efficiency) -> float:
    return estimate(anchor, efficiency).decode(anchor.batch, anchor.context).ms


def fit(anchors: Sequence[Anchor], collective: float | None = 1.0) -> Efficiency:
    """By least squares of relative errors, of anchors that are not left out: ``ms = reading / bandwidth + layer_us *
    layers + mixture_us * mixtures + collective * exchanging``. ``collective``: ``None`` fits it, too. Coefficients are
    at least 0, and a bandwidth at most that of the data sheet. Raises ``ValueError`` for too few anchors."""
    used = [anchor for anchor in anchors if not anchor.left_out]
    rows, rests = [], []
    for anchor in used:
        ideal = estimate(anchor, IDEAL).decode(anchor.batch, anchor.context)
        model = graph(anchor.model)
        mixtures = sum(isinstance(node.op, Experts) for node in model.nodes)
        row = [ideal.reading, len(model.layers) / 1e3, mixtures / 1e3, ideal.exchanging]
        fixed = 0.0 if collective is None else collective * row.pop()
        rows.append([part / anchor.ms for part in row])
        rests.append((anchor.ms - fixed) / anchor.ms)
    found = bounded(rows, rests, [1.0, *[0.0] * (len(rows[0]) - 1)] if rows else [])
    return Efficiency(
        bandwidth=1.0 / found[0],
        layer_us=found[1],
        mixture_us=found[2],
        collective=found[3] if collective is None else collective,
        source=f"{len(used)} published figures of {used[0].stack}",
    )


def bounded(rows: Sequence[Sequence[float]], rests: Sequence[float], lowest: Sequence[float]) -> list[float]:
    """``x``, each at least as ``lowest`` says, that makes the sum of squares of ``rows @ x - rests`` smallest: the best
    of all ways to leave some at their bounds."""
    if len(rows) < len(lowest) or not lowest:
        raise ValueError(f"{len(rows)} figures, expected at least as many as there are unknowns")
    best: tuple[float, list[float]] | None = None
    for count in range(len(lowest) + 1):
        for free in combinations(range(len(lowest)), count):
            x = _solved(rows, rests, lowest, free)
            if x is None or any(value < bound - 1e-12 for value, bound in zip(x, lowest)):
                continue
            error = sum((sum(a * b for a, b in zip(row, x)) - rest) ** 2 for row, rest in zip(rows, rests))
            if best is None or error < best[0]:
                best = error, x
    assert best is not None
    return best[1]


def _solved(
    rows: Sequence[Sequence[float]], rests: Sequence[float], lowest: Sequence[float], free: Sequence[int]
) -> list[float] | None:
    """With all but ``free`` ones at their bounds, by the normal equations; ``None`` where they have no one solution."""
    x = list(lowest)
    left = [rest - sum(a * b for a, b in zip(row, lowest)) for row, rest in zip(rows, rests)]
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in free] + [sum(row[i] * y for row, y in zip(rows, left))]
        for i in free
    ]
    for i in range(len(free)):
        pivot = max(range(i, len(free)), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            return None
        for k in range(len(free)):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i])]
    for i, column in enumerate(free):
        x[column] += matrix[i][-1] / matrix[i][i]
    return x
