"""The tables of a comparison and its verdict."""

import io

import pytest
from rich.console import Console
from tests.lab.eval.drafting.test_figures import drafted, plain

from engine_lab.eval.drafting.figures import drafted_figures, plain_figures
from engine_lab.eval.drafting.main import differences_of
from engine_lab.eval.drafting.prompts import Prompt
from engine_lab.eval.drafting.report import Report, Row, failures, render
from engine_lab.eval.drafting.worker import Run

PROMPTS = [Prompt("What is one?", (1,)), Prompt("What is two?", (2,))]
WANTED = Run(outputs=[(5, 6, 7), (8, 9)])


def report(differences=(), dtype="float32", max_slowdown=None, runs=None):
    runs = runs or [drafted(), drafted()]
    rows = (
        Row("drafter=none", ("drafter=none",), 4, plain_figures([plain()] * 2)),
        Row("drafter=mine drafter.path=here", ("drafter=mine",), 4, drafted_figures(runs, [plain()] * 2)),
    )
    return Report("m", dtype, "asked.txt", {"4": 8}, 2, 64, max_slowdown, rows, 16, tuple(differences))


def printed(shown):
    out = io.StringIO()
    Console(file=out, width=120).print(render(shown))
    return " ".join(out.getvalue().split())


def differences(*outputs):
    return differences_of("drafter=mine", 4, PROMPTS, [Run(outputs=list(outputs))], [WANTED])


def test_equal_answers_are_no_difference():
    assert differences((5, 6, 7), (8, 9)) == [] and failures(report()) == []
    assert "all 16 answers equal those without drafts" in printed(report())


@pytest.mark.parametrize(
    ("output", "says"),
    [((8, 4), "token 1 is 4, without drafts 9"), ((8,), "token 1 is the end"), ((8, 9, 3), "without drafts the end")],
)
def test_a_difference_names_the_prompt_and_the_first_token_that_differs(output, says):
    (line,) = failures(report(differences((5, 6, 7), output)))
    assert says in line and "'What is two?'" in line and "drafter=mine, batch 4" in line


def test_many_differences_are_counted_and_the_first_shown():
    lines = failures(report(differences((1,), (2,)) * 4))
    assert len(lines) == 6 and lines[-1] == "3 more answers differ"


def test_in_bfloat16_a_difference_is_told_and_explained_but_is_no_failure():
    shown = report(differences((5, 6, 7), (8, 4)), dtype="bfloat16")
    assert failures(shown) == []
    assert "1 of 16 answers differ" in printed(shown) and "model.dtype=float32 all must be equal" in printed(shown)


def test_a_drafter_that_may_be_slower_than_allowed_fails():
    slow = [drafted(wall_ms=500.0), drafted(wall_ms=520.0)]  # 1.00 and 1.04 of the time without drafts
    assert failures(report(runs=slow, max_slowdown=1.5)) == []
    (line,) = failures(report(runs=slow, max_slowdown=1.05))
    assert "up to 1.274" in line and "mean 1.020" in line and "at most 1.05" in line


def test_the_tables_show_the_split_and_the_reasons():
    shown = printed(report())
    assert "mine path=here │ 2.00 │ 1.000 │ 5.000 │ 2.000 │ 4.000 │ 1.25 │ 0.800 <= 0.800" in shown
    assert "2.00 │ 0.125 │ 0.25 │ 1.25 │ 1.33 │ 94% │ 80 25" in shown
