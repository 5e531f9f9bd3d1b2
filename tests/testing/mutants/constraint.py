"""Constraints with a bug each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.contracts.constraint import Grammar, GrammarError
from engine.testing.constraint import ConstraintConformance
from engine_plugins.constraint.llguidance import LLGuidance, LLGuidanceConfig
from tests.testing.mutants.mutant import OnPlugin, mutant

FOLLOWED = "test_texts_of_the_grammar_are_followed_to_their_end"
REFUSED = "test_other_texts_are_not"
UNCHANGED = "test_a_refused_token_changes_nothing"
ALONG = "test_what_masks_allow_may_be_taken_all_along_an_output"
AFTER = "test_the_end_may_follow_the_end"
BACK = "test_tokens_are_taken_back"
END_BACK = "test_the_end_is_taken_back"
APART = "test_matchers_of_one_grammar_are_independent"
FORCED = "test_what_is_forced_follows_and_changes_nothing"
IN_TEXT = "test_calls_stand_in_text_where_they_may"
WRONG = "test_wrong_grammars_are_refused_in_a_line"


class Suite(OnPlugin, ConstraintConformance):
    def make(self) -> Any:
        return self.plugin(LLGuidanceConfig(), self.context())


class Place:
    """A matcher that passes everything on to a correct one."""

    def __init__(self, right: Any) -> None:
        self.right = right
        self.taken: list[int] = []

    def advance(self, token: int) -> bool:
        took = bool(self.right.advance(token))
        self.taken += [token] * took
        return took

    def roll_back(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]
        self.right.roll_back(count)

    def fill(self, mask: Tensor) -> None:
        self.right.fill(mask)

    def forced(self) -> Any:
        return self.right.forced()


class Constraint(LLGuidance):
    """Hands out matchers of a kind."""

    place: type[Place] = Place

    def compile(self, grammar: Grammar) -> Any:
        return self.place(super().compile(grammar))


class _AllowsAll(Place):
    def fill(self, mask: Tensor) -> None:
        mask.fill_(-1)


@mutant(Suite, REFUSED, UNCHANGED, ALONG)
class AllowsAll(Constraint):
    """Masks forbid nothing."""

    place = _AllowsAll


class _NoEnd(Place):
    def fill(self, mask: Tensor) -> None:
        self.right.fill(mask)
        mask[0] &= ~(1 << 2)


@mutant(Suite, FOLLOWED, ALONG, AFTER)
class NoEnd(Constraint):
    """The end token is never allowed."""

    place = _NoEnd


class _AddsBits(Place):
    def fill(self, mask: Tensor) -> None:
        before = mask.clone()
        self.right.fill(mask)
        mask |= before


@mutant(Suite, ALONG)
class AddsBits(Constraint):
    """Writes a mask into what its memory held."""

    place = _AddsBits


class _OneBack(Place):
    def roll_back(self, count: int) -> None:
        super().roll_back(min(count, 1))


@mutant(Suite, BACK)
class OneBack(Constraint):
    """Takes a single token back, however many it should."""

    place = _OneBack


@mutant(Suite, APART, ALONG)
class Shared(Constraint):
    """All outputs of a grammar have one matcher."""

    def compile(self, grammar: Grammar) -> Any:
        made = self.__dict__.setdefault("made", {})
        if grammar not in made:
            made[grammar] = super().compile(grammar)
        return made[grammar]


@mutant(Suite, IN_TEXT)
class MustCall(Constraint):
    """Every output must call."""

    def compile(self, grammar: Grammar) -> Any:
        return super().compile(Grammar(grammar.kind, grammar.text.replace('"in_text":true', '"in_text":false')))


class _ForcesAny(Place):
    def forced(self) -> Any:
        return [5]


@mutant(Suite, FORCED)
class ForcesAny(Constraint):
    """Says that a token is certain which is forbidden."""

    place = _ForcesAny


class _TakesForced(Place):
    def forced(self) -> Any:
        found = self.right.forced()
        assert all(self.advance(token) for token in found)
        return found


@mutant(Suite, FORCED)
class TakesForced(Constraint):
    """Takes what it is asked about."""

    place = _TakesForced


class _TakesAll(Place):
    def advance(self, token: int) -> bool:
        super().advance(token)
        return True


@mutant(Suite, UNCHANGED, raises=GrammarError)
class TakesAll(Constraint):
    """Says that it has taken what it has not."""

    place = _TakesAll


class _EndIsFinal(Place):
    def roll_back(self, count: int) -> None:
        if self.taken[-1:] != [2]:
            super().roll_back(count)


@mutant(Suite, END_BACK)
class EndIsFinal(Constraint):
    """An output that has ended stays so, even if its end was a draft."""

    place = _EndIsFinal


class _NothingAfterTheEnd(Place):
    def fill(self, mask: Tensor) -> None:
        self.right.fill(mask)
        if self.taken[-1:] == [2]:
            mask.zero_()


@mutant(Suite, AFTER)
class NothingAfterTheEnd(Constraint):
    """Nothing may follow the end: a step that is under way finds no token."""

    place = _NothingAfterTheEnd


@mutant(Suite, WRONG)
class SaysIt(LLGuidance):
    """Says all that is wrong, over several lines."""

    def compile(self, grammar: Grammar) -> Any:
        try:
            return super().compile(grammar)
        except GrammarError as error:
            raise GrammarError(f"wrong grammar:\n{error}") from None


@mutant(Suite, FOLLOWED, ALONG)
class Strict(Constraint):
    """Reads every grammar as a text that is meant literally."""

    def compile(self, grammar: Grammar) -> Any:
        return self.place(LLGuidance.compile(self, Grammar("regex", "hello")))
