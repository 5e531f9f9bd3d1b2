"""Bugs planted into embedders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.testing.context import build_context
from engine.testing.embedder import EmbedderConformance
from engine_plugins.embedder.ngrams import NgramsConfig, NgramsEmbedder
from tests.testing.mutants.mutant import OnPlugin, mutant


class Suite(OnPlugin, EmbedderConformance):
    def make(self) -> Any:
        return self.plugin(NgramsConfig(), build_context())


@mutant(Suite, "test_a_vector_has_length_one_or_none")
class CountsOnly(NgramsEmbedder):
    """Hands back counts, so that long texts are similar to everything."""

    def embed(self, text: str) -> Sequence[float]:
        return [value * len(text) for value in super().embed(text)]


@mutant(Suite, "test_a_vector_has_as_many_finite_numbers_as_it_says")
class OneMore(NgramsEmbedder):
    """Adds the length of the text at the end."""

    def embed(self, text: str) -> Sequence[float]:
        return [*super().embed(text), 0.0]


@mutant(Suite, "test_a_vector_has_as_many_finite_numbers_as_it_says", raises=ZeroDivisionError)
class DividesByLength(NgramsEmbedder):
    """Divides by the length of a text that may be empty."""

    def embed(self, text: str) -> Sequence[float]:
        return [value * len(text) / len(text) for value in super().embed(text)]


@mutant(Suite, "test_equal_texts_have_equal_vectors")
class HashesAnew(NgramsEmbedder):
    """Hashes with a seed of its own each time it is built."""

    _built = 0

    def __init__(self, config: NgramsConfig, context: Any) -> None:
        super().__init__(config, context)
        HashesAnew._built += 1
        self._seed = HashesAnew._built

    def embed(self, text: str) -> Sequence[float]:
        return super().embed(f"{text} seed{self._seed}")


@mutant(Suite, "test_something_is_known_of_some_text")
class KnowsNothing(NgramsEmbedder):
    """Hands back zeros for every text."""

    def embed(self, text: str) -> Sequence[float]:
        return [0.0] * self.dim


@mutant(Suite, "test_a_vector_that_was_handed_back_stays_as_it_is")
class OneBuffer(NgramsEmbedder):
    """Computes into one list that it hands back every time."""

    def __init__(self, config: NgramsConfig, context: Any) -> None:
        super().__init__(config, context)
        self._buffer = [0.0] * self.dim

    def embed(self, text: str) -> Sequence[float]:
        self._buffer[:] = super().embed(text)
        return self._buffer


@mutant(Suite, "test_it_does_not_block")
class AsksAServer(NgramsEmbedder):
    """Waits 0.1 s for a server that embeds."""

    def embed(self, text: str) -> Sequence[float]:
        time.sleep(0.1)
        return super().embed(text)


@mutant(Suite, "test_other_texts_have_other_vectors")
class LooksAtTheEnd(NgramsEmbedder):
    """Looks at the last character alone, which most questions share."""

    def embed(self, text: str) -> Sequence[float]:
        return super().embed("asked" if text.endswith("?") else text)
