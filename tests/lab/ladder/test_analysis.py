"""What is said of recorded runs: winners, none, what is unfinished, and outputs that differ."""

import io

import pytest
from rich.console import Console
from tests.lab.ladder.recorded import NOISE, a_ladder, a_run

from engine_lab.bench.record import Drafting, RequestRecord
from engine_lab.bench.slo import parse_slo
from engine_lab.ladder.analysis import (
    BETTER,
    UNDECIDED,
    UNFINISHED,
    WORSE,
    observed_limit,
    summarise_ladder,
)
from engine_lab.ladder.case_study import EXPECTED
from engine_lab.ladder.comparisons import ALL
from engine_lab.ladder.figures import run_of
from engine_lab.ladder.record import Output
from engine_lab.ladder.rungs import DEFAULT_RUNGS, Rung, parse_rung
from engine_lab.ladder.screen import render
from engine_lab.ladder.survey import divergence


def verdicts(ladder):
    return [row["figures"]["itl"]["verdict"] for row in ladder.summary["rows"]]


def test_a_winner_is_named_only_if_the_interval_leaves_out_no_change():
    ladder = a_ladder([0.5, 1.0, 1.5, 1.0])
    assert verdicts(ladder) == [BETTER, UNDECIDED, WORSE, UNDECIDED]
    found = ladder.summary["rows"][1]["figures"]["itl"]
    assert found["low"] < 1.0 < found["high"]


def test_nothing_is_said_before_all_pairs_were_run():
    ladder = a_ladder([0.5, 0.5, 0.5, 0.5], count=9)
    assert verdicts(ladder) == [UNFINISHED] * 4
    assert {row["figures"]["itl"]["low"] for row in ladder.summary["rows"]} == {None}
    assert ladder.summary["intervals"] == 0


def test_intervals_are_counted_with_what_may_be_false_of_them():
    summary = a_ladder([0.5, 1.0, 1.5, 1.0]).summary
    assert summary["intervals"] == 4 * 5
    assert summary["expected_false"] == pytest.approx(1.0)


def test_a_figure_that_one_side_lacks_is_not_compared():
    ladder = a_ladder([0.5, 1.0, 1.0, 1.0])
    ladder.comparisons[0].pairs = [(a_run(1.0, itl=None), a_run(x)) for x in NOISE]
    row = summarise_ladder(ladder)["rows"][0]
    assert "itl" not in row["figures"] and "e2e_p50" in row["figures"]


def test_goodput_is_compared_by_difference_and_more_is_better():
    ladder = a_ladder([1.0, 1.0, 1.0, 1.0])
    ladder.comparisons[0].pairs = [(a_run(1.0, goodput=0.0), a_run(1.0, goodput=0.7 + x / 10)) for x in NOISE]
    found = summarise_ladder(ladder)["rows"][0]["figures"]["goodput"]
    assert found["verdict"] == BETTER and found["estimate"] == pytest.approx(0.8, abs=0.01)


def test_equal_engines_are_counted_apart():
    same = a_ladder([1.0, 1.0, 1.0, 1.0], num_same=3).summary["same"]
    assert same["comparisons"] == same["without_any_winner"] == 3
    assert same["by_figure"]["itl"]["named"] == 0 and same["by_figure"]["itl"]["high"] > 0.5


def test_outputs_are_compared_with_those_of_the_rung_below():
    first, second, *_ = a_ladder([1.0, 1.0, 1.0, 1.0]).summary["rows"]
    assert first["outputs"]["equal"] == first["outputs"]["compared"] == 1
    assert (second["outputs"]["equal"], second["outputs"]["first_token"], second["outputs"]["margin"]) == (0, 1, 0.5)


def test_outputs_to_other_prompts_are_not_compared():
    rungs = [Rung("static", ("workload.static_first=true",)), Rung("b", ("b=1",))]
    first, second, *_ = a_ladder([1.0, 1.0, 1.0, 1.0], rungs=rungs).summary["rows"]
    assert first["outputs"] is None and second["outputs"] is not None


def test_a_lower_limit_of_tokens_is_no_difference():
    long, short = Output("one two", ["one", " two"], [3.0, 0.5]), Output("one", ["one"], [3.0])
    assert divergence(long, short, may_be_cut=True) is None
    assert divergence(long, short, may_be_cut=False) == (1, 0.5)
    assert divergence(short, long, may_be_cut=False) == (1, None)


def test_a_shared_prefix_is_kept_once_only_where_it_comes_first():
    rungs = [Rung("a", ("a=1",)), Rung("static", ("workload.static_first=true",))]
    mixed, static, *_ = a_ladder([1.0, 1.0, 1.0, 1.0], rungs=rungs).summary["rows"]
    assert mixed["users"] == {"apart": 10.0, "sharing": 10.0}
    assert static["users"] == {"apart": 10.0, "sharing": pytest.approx((1100 - 80) / 30)}


def test_floors_are_of_bytes_and_products():
    floors = a_ladder([1.0, 1.0, 1.0, 1.0]).summary["rows"][0]["floors"]
    assert floors["itl"] == pytest.approx(1.0)  # 4 MB at 4 GB/s, in ms
    assert floors["ttft_p50"] == pytest.approx(2 * 1e6 * 50 / 100e9 * 1e3)  # 50 of 100 prompt tokens are new


def test_p99_of_few_observations_has_no_interval():
    few, many = observed_limit(range(1, 101)), observed_limit(range(1, 1001))
    assert (few["p99"], few["low"]) == (99, None)
    assert (many["p99"], many["low"], many["high"]) == (990, 983, 997)
    assert observed_limit([]) is None


def test_a_run_has_the_same_ttft_streamed_or_not():
    drafting = Drafting(0, 0, 0, 0.0, decode_ms=40.0)
    streamed = RequestRecord(0, 0.0, 0.0, 0.05, (0.01, 0.05), 0.05, 10, 0, 5, drafting=drafting)
    whole = RequestRecord(0, 0.0, 0.0, 0.05, (0.05,), 0.05, 10, 0, 5, drafting=drafting)
    a, b = (run_of([record], [], parse_slo("ttft=20ms")).figures for record in (streamed, whole))
    assert a["ttft_p50"] == b["ttft_p50"] == pytest.approx(10.0)
    assert a["itl"] == b["itl"] == pytest.approx(10.0)
    assert (a["output_p50"], b["output_p50"]) == (pytest.approx(10.0), pytest.approx(50.0))
    assert (a["goodput"], b["goodput"]) == (1.0, 0.0)


def test_failed_requests_count_in_goodput_alone():
    drafting = Drafting(0, 0, 0, 0.0, decode_ms=40.0)
    good = RequestRecord(0, 0.0, 0.0, 0.05, (0.01, 0.05), 0.05, 10, 0, 5, drafting=drafting)
    bad = RequestRecord(1, 0.0, 0.0, 9.0, error="http_500")
    run = run_of([good, bad], [], parse_slo("ttft=20ms"))
    assert (run.requests, run.failed, run.figures["goodput"]) == (2, 1, 0.5)
    assert run.figures["e2e_p50"] == pytest.approx(50.0)


def test_the_case_studys_ratios_are_those_of_its_table():
    every = EXPECTED["all rungs"].ratios
    assert (1 / every["ttft_p50"], 1 / every["ttft_p95"]) == (pytest.approx(9.6), pytest.approx(1.5))
    assert (1 / every["itl"], 1 / every["e2e_p50"]) == (pytest.approx(3.2, abs=0.05), pytest.approx(3.8, abs=0.05))
    product = 1.0
    for name in ("streaming", "quantizer", "chunked prefill", "drafter"):
        product *= EXPECTED[name].ratios["itl"]
    assert product == pytest.approx(every["itl"])


def test_the_case_study_contradicts_itself_where_a_note_says_so():
    chunked = EXPECTED["chunked prefill"]
    assert 1 - chunked.ratios["ttft_p95"] == pytest.approx(0.22, abs=0.005) and "22 %" in chunked.notes[0]
    (note,) = EXPECTED["max_tokens"].notes
    assert int((9.5 - 0.6) / 0.042 + 0.5) == 212 and "212" in note and "350" in note


def test_all_rungs_are_put_beside_the_case_study_only_if_its_own_are_among_them():
    def expected(rungs):
        ladder = a_ladder([0.5] * (2 * len(rungs)), rungs=rungs)
        (whole,) = (row for row in ladder.summary["rows"] if row["kind"] == ALL)
        return whole["figures"]["itl"]["expected"]

    own = [parse_rung(text) for text in DEFAULT_RUNGS]
    assert expected(own) == EXPECTED["all rungs"].ratios["itl"]
    assert expected(own[:2]) is None


def test_no_figure_is_cut_at_80_columns():
    named = [Rung("prompts-in-another-order", ("workload.static_first=true",)), Rung("quantizer", ("quantizer=int8",))]
    ladder = a_ladder([0.00123, 12345.678, 1.0, 1.5], rungs=named)
    for measured in ladder.comparisons:
        ratios = [after.figures["ttft_p50"] / 8.0 for _, after in measured.pairs]
        measured.pairs = [(a_run(1.0, goodput=0.5), a_run(ratio, goodput=0.25)) for ratio in ratios]
    ladder.summary = summarise_ladder(ladder)
    console = Console(file=io.StringIO(), width=80)
    console.print(render(ladder))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    row = next(number for number, line in enumerate(lines) if line.strip().startswith("quantizer"))
    shown = [line.split() for line in lines[row : row + 3]]
    assert shown[0][1:] == ["12345"] * 5 + ["-0.25"]
    assert shown[1] == ["12099-"] * 5 + ["-0.25", "to"] and shown[2] == ["12592"] * 5 + ["-0.25"]
