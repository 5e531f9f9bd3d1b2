"""Planted bugs are caught by the suites' tests that are said to catch them. See ``tests/testing/mutants``."""

from __future__ import annotations

import pytest

from engine.contracts.slots import SLOTS
from tests.selection import few
from tests.testing.mutants.mutant import Mutant, all_mutants, correct_plugins, failure, names_of_tests
from tests.testing.mutants.table import PAGE, table

WITHOUT_A_SUITE = {"parallelism"}


@few(20)
@pytest.mark.parametrize("one", [one for one in all_mutants() if not one.missed], ids=lambda one: one.name)
def test_a_mutant_is_caught_by_every_test_it_names(one: Mutant) -> None:
    suite = one.tests()
    assert set(one.caught_by) <= set(names_of_tests(suite))
    passed = [test for test in one.caught_by if failure(suite, test, one.raises) is None]
    assert not passed, f"{one.bug} Not caught by {', '.join(passed)}"


@pytest.mark.parametrize("suite", correct_plugins(), ids=lambda suite: suite.__name__)
def test_what_mutants_derive_from_passes(suite: type) -> None:
    assert {test: failed for test in names_of_tests(suite) if (failed := failure(suite, test)) is not None} == {}


def test_nine_of_ten_mutants_are_caught_and_every_suite_has_at_least_five() -> None:
    mutants = all_mutants()
    missed = [one.name for one in mutants if one.missed]
    assert len(mutants) >= 60
    assert len(missed) <= 0.1 * len(mutants), missed
    for slot in set(SLOTS) - WITHOUT_A_SUITE:
        assert sum(one.slot == slot for one in mutants) >= 5, slot


def test_the_table_has_every_mutant() -> None:
    assert PAGE.read_text() == table(all_mutants()), f"python -m tests.testing.mutants --table > {PAGE}"
