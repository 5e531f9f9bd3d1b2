"""Which sets of overrides are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_lab.ladder.rungs import Rung, Words, merged
from engine_lab.shared.pairs import before_first

ADDED, LEFT_OUT, ALL, SAME = "added", "left out", "all", "A/A"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of words; ratios are of ``after`` to ``before``."""

    kind: str
    """:data:`ADDED` to the rungs below, :data:`LEFT_OUT` of all, :data:`ALL` rungs beside none, :data:`SAME` twice."""
    name: str
    before: Words
    after: Words

    @property
    def is_same(self) -> bool:
        return self.kind == SAME

    def order(self, seed: int, pairs: int) -> list[bool]:
        """See :func:`~engine_lab.shared.pairs.before_first`."""
        return before_first(f"{seed}/{self.kind}/{self.name}", pairs)


def plan(base: Words, rungs: Sequence[Rung], leave_one_out: bool = True, num_same: int = 0) -> list[Comparison]:
    """All comparisons of a ladder. Leaving out the topmost rung is what adding it is, and is not measured twice."""
    words = [rung.words for rung in rungs]
    top = merged(base, *words)
    found = [
        Comparison(ADDED, rung.name, merged(base, *words[:i]), merged(base, *words[: i + 1]))
        for i, rung in enumerate(rungs)
    ]
    if len(rungs) > 1:
        found.append(Comparison(ALL, "all rungs", base, top))
    if leave_one_out:
        found += [
            Comparison(LEFT_OUT, rung.name, merged(base, *words[:i], *words[i + 1 :]), top)
            for i, rung in enumerate(rungs[:-1])
        ]
    return found + [Comparison(SAME, f"A/A {i + 1}", base, base) for i in range(num_same)]
