"""The table of all mutants, as ``README.md`` has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.testing.mutants.mutant import Mutant

PAGE = Path(__file__).with_name("README.md")
HEAD = """# Planted bugs

Each plugin in this folder has one bug. The suites of `engine.testing` are tested with them: a bug that no test catches
is one that a plugin author would ship. Made by `python -m tests.testing.mutants --table`.

"""


def table(mutants: Sequence[Mutant]) -> str:
    caught = sum(not one.missed for one in mutants)
    lines = [f"{caught} of {len(mutants)} are caught.", ""]
    for slot, group in groupby(mutants, key=lambda one: one.slot):
        lines += [f"## {slot}", "", "| mutant | bug | caught by |", "|---|---|---|"]
        lines += [_row(one) for one in group]
        lines.append("")
    return HEAD + "\n".join(lines)


def _row(one: Mutant) -> str:
    tests = ", ".join(f"`{test}`" for test in one.caught_by) or f"**missed**: {one.missed}"
    return f"| `{one.plugin.__name__}` | {one.bug} | {tests} |"
