"""Embedder ``mine``: counts the letters of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineEmbedderConfig(SlotConfig):
    """The keys ``embedder.<field>``."""

    dim: int = 64
    """Numbers in a vector."""

    def __post_init__(self) -> None:
        at_least("embedder.dim", self.dim, 16)


@hookimpl
def engine_embedder() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.embedder.plugin:MineEmbedder",
            config=MineEmbedderConfig,
            doc="Counts the letters of a text.",
        )
    ]


class MineEmbedder:
    """Lives in the process that answers HTTP requests, so ``embed`` must be quick."""

    def __init__(self, config: MineEmbedderConfig, context: BuildContext) -> None:
        self.dim = config.dim

    def embed(self, text: str) -> Sequence[float]:
        """A vector of length 1; all zeros of a text of which nothing is known."""
        vector = [0.0] * self.dim
        for letter in text.lower():
            vector[ord(letter) % self.dim] += 1.0
        length = math.sqrt(sum([value * value for value in vector])) or 1.0
        return [value / length for value in vector]
