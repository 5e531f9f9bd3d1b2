"""Slot ``architecture``: how does this model family compute, and how are its tensors named?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig


@runtime_checkable
class Architecture(Protocol):
    """The plugin, made by ``factory(config)``: it knows no device and no settings. It never touches a tensor: it
    describes. Called several times, in any thread and in the API process as well, so its module imports no torch."""

    def describe(self, model: ModelConfig, b: Builder) -> None:
        """Record the model in ``b``: most tokens of a sequence, the embedding, the layers, the head; the same for equal
        ``model``. Sizes and everything else about the family are read from ``model.raw``; what is missing there has the
        family's default. Raises ``ValueError`` for what the plugin does not compute, naming key, value and what was
        expected."""
        ...


@runtime_checkable
class NestedArchitecture(Protocol):
    """An architecture of checkpoints whose ``config.json`` has a part for text, beside others."""

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part for text of a whole ``config.json``; what ``model.raw`` is from then on."""
        ...
