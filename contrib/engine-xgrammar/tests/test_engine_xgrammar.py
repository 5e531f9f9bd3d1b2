import pytest

from engine.contracts.constraint import GrammarKind
from engine.testing.constraint import ConstraintConformance

pytest.importorskip("xgrammar")

from engine_xgrammar import XGrammar, XGrammarConfig


class TestXGrammar(ConstraintConformance):
    kinds = ("json_schema", "json_object", "regex", "choice", "gbnf")

    def make(self) -> XGrammar:
        return XGrammar(XGrammarConfig(), self.context())

    def test_what_masks_allow_may_be_taken_all_along_an_output(self, kind: GrammarKind) -> None:
        if kind != "json_schema":
            super().test_what_masks_allow_may_be_taken_all_along_an_output(kind)
            return
        with pytest.raises(AssertionError):  # xgrammar 0.2.8 allows control characters in strings with a maxLength
            super().test_what_masks_allow_may_be_taken_all_along_an_output(kind)
