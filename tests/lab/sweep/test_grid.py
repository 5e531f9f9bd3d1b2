"""From words to plugin sets."""

import pytest

from engine.assembly.errors import AssemblyError
from engine_lab.sweep.grid import axes_of, candidates_of

WORDS = ("+preset=latency", "device=cpu", "drafter=none,ngram", "scheduler.token_budget=range(512,1025,512)")


def test_every_combination_is_a_set_named_by_what_differs() -> None:
    found = candidates_of(WORDS, [])
    assert [one.name for one in found] == [
        f"drafter={drafter} scheduler.token_budget={budget}" for drafter in ("none", "ngram") for budget in (512, 1024)
    ]
    assert found[0].words == ("+preset=latency", "device=cpu", "drafter=none", "scheduler.token_budget=512")


def test_a_star_is_every_option_of_the_slot_but_auto() -> None:
    (drafters,) = axes_of(["drafter=*"], [])
    assert {"drafter=none", "drafter=ngram", "drafter=eagle3"} <= set(drafters) and "drafter=auto" not in drafters
    assert axes_of(["drafter=glob([n*,e*],exclude=early*)"], []) == [
        ("drafter=eagle3", "drafter=ngram", "drafter=none")
    ]


def test_what_negotiation_refuses_says_why_and_is_not_measured() -> None:
    found = candidates_of(["device=cpu", "attention_kernel=cpu,triton"], [])
    assert not found[0].refused and "attention_kernel=triton" in found[1].refused


def test_equal_plans_are_measured_once_unless_they_shall_not_be() -> None:
    words = ["device=cpu", "drafter=none,none,ngram"]
    found = candidates_of(words, [])
    assert [one.same_as for one in found] == [None, 0, None] and found[1].name == "drafter=none (2)"
    assert [one.same_as for one in candidates_of(words, [], keep_equal=True)] == [None] * 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["drafter=none,ngramm"], ""),
        (["drafter=glob(zz*)"], "stands for nothing"),
        (["seed=interval(0,1)"], "expected values to try"),
        (["drafter=nope,nada"], "no such drafter option"),
        (["a=b=c"], "cannot read override 'a=b=c'"),
    ],
)
def test_words_that_make_no_set_are_refused(words: list[str], complaint: str) -> None:
    if not complaint:
        assert "did you mean 'ngram'" in candidates_of(["device=cpu", *words], [])[1].refused
        return
    with pytest.raises(AssemblyError, match=complaint):
        candidates_of(words, [])


def test_a_grid_that_is_too_large_is_refused_with_its_sizes() -> None:
    with pytest.raises(ValueError, match="8 x 100 = 800 plugin sets; expected at most 512"):
        axes_of(["drafter=choice(a,b,c,d,e,f,g,h)", "seed=range(0,100)"], [])
