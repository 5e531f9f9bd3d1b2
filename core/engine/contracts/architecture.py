"""Slot ``architecture``: how does this model family compute, and how are its tensors named?"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from engine.contracts.graph import Builder
from engine.contracts.model import ModelFacts


@runtime_checkable
class Architecture(Protocol):
    """The plugin. It never touches a tensor: it describes. Called several times, in any thread."""

    def describe(self, model: ModelFacts, b: Builder) -> None:
        """Record the model in ``b``: the embedding, the layers, the head; the same for equal ``model``. The core
        refuses a graph whose sizes do not agree with ``model``, and says where."""
        ...
