from __future__ import annotations

import pytest

from engine.testing.embedder import EmbedderConformance, product


class TestForgotten(EmbedderConformance):
    __test__ = False


def test_a_suite_that_makes_nothing_says_what_it_lacks() -> None:
    with pytest.raises(NotImplementedError, match=r"TestForgotten must define make\(self\)"):
        TestForgotten().make()


def test_the_product_of_two_vectors_is_of_all_numbers_or_refused() -> None:
    assert product((1.0, 2.0), (3.0, 4.0)) == 11.0
    with pytest.raises(ValueError):
        product((1.0,), (1.0, 2.0))
