"""What runs for each sequence of ops, in words, for the plan: made of what was matched and built."""

from __future__ import annotations

from engine.kernels.settings import MOST_TOKENS, Kernel, Lowered, Lowering
from engine.models.fuse import Fused


class Labels:
    """Collects what is lowered."""

    def __init__(self) -> None:
        self._labels: dict[str, list[str]] = {}
        self._uncaptured: str | None = None
        self.waits = ""
        """Why no CUDA graph can hold a step; empty: one can, as far as kernels tell."""

    def add(self, fused: Fused[Kernel], lowered: Lowered, in_layer: bool) -> None:
        found = self._labels.setdefault(fused.title, [])
        if lowered.label not in found:
            found.append(lowered.label)
        self.waits = self.waits or lowered.waits
        if in_layer and self._uncaptured is None and lowered.not_native is not None:
            self._uncaptured = f"{fused.title}: {lowered.not_native}"

    def lines(self, lowering: Lowering) -> tuple[str, ...]:
        """One for each sequence, in the order of the model, and with C++ kernels one for whole steps."""
        lines = tuple(f"{title}: {' | '.join(labels)}" for title, labels in self._labels.items())
        if not lowering.native:
            return lines
        reason = lowering.why_uncaptured or self._uncaptured
        if reason is not None:
            return (*lines, f"steps: run uncaptured (slower): {reason}")
        return (*lines, f"steps: up to {MOST_TOKENS} tokens are one call for all layers; else op by op")
