"""What the table of ways to choose between two models adds up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.tiers import LOOKED_AT, Answered, Table, is_small, separation, sure


def test_separation_is_the_share_of_pairs_in_order() -> None:
    assert separation([3.0, 1.0, 2.0], [True, False, False]) == 1.0
    assert separation([1.0, 3.0, 2.0], [True, False, False]) == 0.0
    assert separation([1.0, 1.0, 0.0, 2.0], [True, False, False, True]) == pytest.approx(3.5 / 4)


def test_a_look_costs_its_tokens_and_the_prompt_once(capsys: pytest.CaptureFixture[str]) -> None:
    small = [Answered("yes", (-0.1,) * 30, 100), Answered("no", (-9.0,) * 30, 100)]
    large = [Answered("yes", (0.0,) * 10, 100), Answered("never", (0.0,) * 10, 100)]
    table = Table(["a", "b"], {"small": small, "large": large}, {"small": 1, "large": 10}, range(2))
    assert (
        table.look(0, "small", answers=True) == LOOKED_AT and table.look(1, "small", answers=False) == 100 + LOOKED_AT
    )
    table.row("cascade", "small", lambda text: True, -1.0)
    cost = (130 + LOOKED_AT + 10 * 110 + 100 + LOOKED_AT) / (2 * 10 * 110)
    assert f"| cascade | {cost:.2f} | 50% | 100.0% " in capsys.readouterr().out
    assert sure(Answered("", (), 1)) == float("-inf")


def test_the_length_rule_is_that_of_the_router() -> None:
    assert is_small("What does json.dumps do?") and not is_small("Continue this:\n```\nx\n```")
