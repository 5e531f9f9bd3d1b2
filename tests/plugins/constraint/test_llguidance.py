"""Constraint ``llguidance``."""

from __future__ import annotations

import pytest

from engine.contracts.constraint import Grammar
from engine.testing.constraint import ConstraintConformance
from engine_plugins.constraint.llguidance import LLGuidance, LLGuidanceConfig


class TestLLGuidance(ConstraintConformance):
    def make(self) -> LLGuidance:
        return LLGuidance(LLGuidanceConfig(), self.context())

    @pytest.mark.parametrize(("most", "text"), [(8, '{ "a" :\n1 }'), (0, '{"a":1}')])
    def test_whitespace_in_json_ends(self, most: int, text: str) -> None:
        """A model that is stuck writes blanks for ever otherwise."""
        made = LLGuidance(LLGuidanceConfig(max_whitespace=most), self.context())
        matcher = made.compile(Grammar("json_object"))
        assert all(matcher.advance(token) for token in self.tokens(text))
        matcher = made.compile(Grammar("json_object"))
        assert matcher.advance(self.tokens("{")[0])
        (blank,) = self.tokens("\n")
        assert [matcher.advance(blank) for _ in range(most + 1)] == [True] * most + [False]
