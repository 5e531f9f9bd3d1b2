"""Conformance suite for embedders: what routers that compare texts rely on.

.. code-block:: python

    class TestMine(EmbedderConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from engine.contracts.embedder import Embedder
from engine.plugin_guard.calls import lacking
from engine.testing.subject import Subject, Suite, filled

TEXTS = (
    "", " ", "?", "a", "How do I return an item?", "how do i return an item", "Wie gebe ich einen Artikel zurück?",
    "如何退货？", "\U0001f600", "3.11", "C++", "e\u0301", "\x00", "\ufeff", "a" * 2000, "word " * 400,
    "line\nline\ttab",
)  # fmt: skip
SHORT = "How do I return an item that does not fit?"
LONGEST_S = 0.05
"""A short text may take so long on the slowest machine; the quickest of several counts."""


def product(one: Sequence[float], two: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(one, two, strict=True)])


class EmbedderConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`."""

    def make(self) -> Embedder:
        """A fresh embedder."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def test_it_fulfils_the_contract(self) -> None:
        made = self.make()
        assert isinstance(made, Embedder), lacking(made, Embedder)
        assert type(made.dim) is int and made.dim > 0, made.dim

    def test_a_vector_has_as_many_finite_numbers_as_it_says(self) -> None:
        embedder = self.make()
        for text in TEXTS:
            vector = embedder.embed(text)
            assert len(vector) == embedder.dim, f"{len(vector)} numbers of {text[:20]!r}, not {embedder.dim}"
            assert all(math.isfinite(value) for value in vector), f"a number of {text[:20]!r} is not finite"

    def test_a_vector_has_length_one_or_none(self) -> None:
        embedder = self.make()
        for text in TEXTS:
            length = math.sqrt(product(*[embedder.embed(text)] * 2))
            assert length == 0.0 or abs(length - 1.0) < 1e-3, f"{length} is the length of {text[:20]!r}"

    def test_something_is_known_of_some_text(self) -> None:
        assert any(any(self.make().embed(text)) for text in TEXTS)

    def test_equal_texts_have_equal_vectors(self) -> None:
        embedder, other = self.make(), self.make()
        for text in (*TEXTS, *reversed(TEXTS)):
            assert list(embedder.embed(text)) == list(other.embed(text)), text[:20]

    def test_other_texts_have_other_vectors(self) -> None:
        embedder = self.make()
        vectors = [list(embedder.embed(text)) for text in (SHORT, "Why is the sea salty?", "What is a leap year?")]
        assert all(product(one, two) < 0.999 for one in vectors for two in vectors if one is not two)

    def test_a_vector_that_was_handed_back_stays_as_it_is(self) -> None:
        embedder = self.make()
        vector = embedder.embed(SHORT)
        before = list(vector)
        for text in TEXTS:
            embedder.embed(text)
        assert list(vector) == before

    def test_it_does_not_block(self) -> None:
        """It is called on the thread of the event loop."""
        embedder, times = self.make(), []
        for _ in range(5):
            begun = time.perf_counter()
            embedder.embed(SHORT)
            times.append(time.perf_counter() - begun)
        assert min(times) < LONGEST_S, f"{min(times):.3f} s for a short text"


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    return filled(subject, [EmbedderConformance], make=lambda self: subject.build())
