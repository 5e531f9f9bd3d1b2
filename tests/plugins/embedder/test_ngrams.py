from __future__ import annotations

import pytest

from engine.testing.context import build_context
from engine.testing.embedder import EmbedderConformance, product
from engine_plugins.embedder.ngrams import NgramsConfig, NgramsEmbedder


def make(dim: int = 256) -> NgramsEmbedder:
    return NgramsEmbedder(NgramsConfig(dim=dim), build_context())


class TestConformance(EmbedderConformance):
    def make(self) -> NgramsEmbedder:
        return make()


def test_words_that_are_spelt_alike_are_similar_whatever_they_mean():
    embedder = make()
    near, far, opposite = (
        product(embedder.embed("enable notifications"), embedder.embed(other))
        for other in ("Enable notification!", "why is the sea salty", "disable notifications")
    )
    assert near > 0.8 and opposite > 0.6 and far < 0.3


def test_it_does_not_know_the_order_of_words():
    embedder = make()
    assert product(embedder.embed("Can cats eat dogs"), embedder.embed("Can dogs eat cats")) == pytest.approx(1.0)


def test_too_few_numbers_are_refused():
    with pytest.raises(ValueError, match=r"embedder\.dim=4: expected 16 to 4096"):
        NgramsConfig(dim=4)
