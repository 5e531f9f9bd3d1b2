"""Slot ``architecture``: how does this model family compute, and how are its tensors named?"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from engine.contracts.model import ModelFacts
from engine.contracts.ops import ModelOps


@runtime_checkable
class Architecture(Protocol):
    """The plugin. It never touches a tensor: it describes. Called several times, in any thread."""

    def describe(self, model: ModelFacts) -> ModelOps:
        """The model as typed ops, with the checkpoint's tensor names; equal ones for equal ``model``. Sizes agree with
        each other and with ``model``: the core refuses ops that do not, and says where."""
        ...
