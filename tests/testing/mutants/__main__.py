"""Runs whole suites on all mutants and prints the table: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.testing.mutants.mutant import SLOTS, Mutant, all_mutants, failure, names_of_tests
from tests.testing.mutants.table import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testing.mutants", description=__doc__)
    parser.add_argument("slots", nargs="*", metavar="slot", help=f"of {', '.join(SLOTS)}; all by default")
    parser.add_argument("--table", action="store_true", help="print the table of what is declared, run nothing")
    chosen = parser.parse_args()
    if unknown := set(chosen.slots) - set(SLOTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SLOTS)}")
    found = [one for one in all_mutants() if one.slot in (chosen.slots or SLOTS)]
    if chosen.table:
        print(table(found), end="")
        return 0
    wrong = [problem for one in found for problem in _tried(one)]
    print("\n".join(wrong) if wrong else "every mutant is caught by the tests it names, or missed as it says")
    return int(bool(wrong))


def _tried(one: Mutant) -> list[str]:
    """Run the whole suite on a mutant, print what fails, and return what its declaration has wrong."""
    suite = one.tests()
    started = time.monotonic()
    failing = [test for test in names_of_tests(suite) if failure(suite, test, (Exception,)) is not None]
    print(f"{one.name}: {', '.join(failing) or 'missed'} ({time.monotonic() - started:.1f} s)", flush=True)
    if one.missed:
        return [f"{one.name} is caught after all, by {', '.join(failing)}"] if failing else []
    return [f"{one.name} is not caught by {test}" for test in one.caught_by if test not in failing]


if __name__ == "__main__":
    sys.exit(main())
