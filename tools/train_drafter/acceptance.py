"""How much of what a drafter says the target would have said, position by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from tools.train_drafter.features import Batch
from torch import Tensor

Matches = Callable[[Batch], tuple[Tensor, Tensor]]
"""A batch -> whether each step of each chain finds the target's greedy token, and where that can be judged, bool
``[steps, rows, A]`` each. Chains follow the answers, so step ``i`` counts only where the steps before it were right."""


@dataclass(slots=True)
class Counts:
    """Of decode steps with drafts, as a server goes through greedy answers with chains of ``steps`` tokens."""

    steps: int
    tried: list[int] = field(default_factory=list)
    """By position: decode steps whose drafts before it were accepted, and in which the answer went on."""
    right: list[int] = field(default_factory=list)
    """Those of them whose draft at this position was accepted, too."""
    decode_steps: int = 0
    tokens: int = 0
    """Of all decode steps: drafts accepted, and the target's own token after them."""

    def __post_init__(self) -> None:
        self.tried, self.right = [0] * self.steps, [0] * self.steps

    @property
    def by_position(self) -> list[float]:
        """Share of drafts that are accepted, given that all before them are."""
        return [right / max(1, tried) for right, tried in zip(self.right, self.tried, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.decode_steps)

    def add(self, right: Tensor, where: Tensor) -> None:
        """One answer, ``[steps, A]``: decode steps one after another, the first where its first token is known."""
        start = 0
        found, judged = right.T.tolist(), where.T.tolist()
        while start < len(found) and judged[start][0]:
            accepted = 0
            for step in range(self.steps):
                if not judged[start][step]:
                    break
                self.tried[step] += 1
                if not found[start][step]:
                    break
                self.right[step] += 1
                accepted += 1
            self.decode_steps += 1
            left = sum(row[0] for row in judged[start:])
            self.tokens += min(accepted + 1, left)
            start += accepted + 1


@torch.no_grad()
def measure(batches: Iterable[Batch], matches: Matches, steps: int) -> dict[str, Counts]:
    """By group of prompts."""
    groups: dict[str, Counts] = defaultdict(lambda: Counts(steps))
    for batch in batches:
        right, where = matches(batch)
        for row, group in enumerate(batch.groups):
            groups[group].add(right[:, row], where[:, row])
    return dict(sorted(groups.items()))


def table(groups: dict[str, Counts]) -> str:
    """Markdown: a line for each group of prompts."""
    steps = max(counts.steps for counts in groups.values())
    positions = "".join(f" {step + 1} |" for step in range(steps))
    lines = [f"| prompts |{positions} tokens/step |", "|---" * (steps + 2) + "|"]
    for name, counts in groups.items():
        shares = "".join(f" {share:.1%} |" for share in counts.by_position)
        lines.append(f"| {name} |{shares} {counts.tokens_per_step:.2f} |")
    return "\n".join(lines)
