from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from engine.contracts.percentiles import TOO_FEW
from engine_lab.bench.compare import read_result, render_comparison, rows, warnings
from engine_lab.bench.record import RequestRecord, Served
from engine_lab.bench.report import render
from engine_lab.bench.result import summarise
from engine_lab.bench.slo import parse_slo

CONFIG = {"model": "m", "url": "http://x", "load": "closed loop, 1 at once", "prompt_length_from": "test", "seed": 0}


def record(index: int, ttft: float = 0.1, lag: float = 0.0, **changes: Any) -> RequestRecord:
    """Five tokens, 10 ms apart, the first after ``ttft`` seconds; due at second ``index``."""
    first = index + ttft
    chunks = tuple(first + 0.01 * i for i in range(5))
    fields: dict[str, Any] = {
        "chunks_s": chunks,
        "end_s": chunks[-1],
        "done_s": chunks[-1],
        "prompt_tokens": 20,
        "output_tokens": 5,
        "finish_reason": "length",
        **changes,
    }
    return RequestRecord(index=index, scheduled_s=float(index), sent_s=index + lag, **fields)


def printed(renderable: Any, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_percentiles_rates_and_totals_of_a_run():
    result = summarise([record(i, ttft=0.1 * (i + 1)) for i in range(10)], [0.0], None, CONFIG)
    ttft = result["metrics"]["ttft_ms"]
    assert (ttft["p50"], ttft["p90"], ttft["max"]) == pytest.approx((500, 900, 1000))
    assert ttft["p95"] is ttft["p99"] is None, "they would be its maximum"
    assert result["metrics"]["tpot_ms"]["mean"] == pytest.approx(10)
    assert result["duration_s"] == pytest.approx(9 + 1.0 + 0.04)
    assert result["throughput"]["output_tokens_per_s"] == pytest.approx(50 / 10.04)
    assert result["tokens"] == {"prompt": 200, "cached": None, "output": 50, "per_chunk": 1.0}
    assert result["valid"]


def test_failures_are_counted_by_kind_and_kept_out_of_latencies():
    bad = record(1, error="http_429", detail="queue is full", chunks_s=(), output_tokens=None)
    result = summarise([record(0), bad, record(2, error="timeout")], [0.0], None, CONFIG)
    assert result["requests"]["ok"] == 1
    assert result["requests"]["failed"]["http_429"] == {"count": 1, "example": "queue is full"}
    assert result["metrics"]["e2e_ms"]["count"] == 1
    assert "1 x http_429: queue is full" in printed(render(result))


def test_each_of_several_engines_has_a_row_of_what_it_served():
    served = [Served("replica-10", 1), Served("replica-2", 1), Served("replica-2", 2)]
    records = [record(i, ttft=0.1 * (i + 1), served=each) for i, each in enumerate(served)]
    bad = record(9, error="http_503", chunks_s=(), output_tokens=None)
    result = summarise([*records, bad], [0.0], None, CONFIG)
    assert list(result["engines"]) == ["replica-2", "replica-10"], "failed ones are no engine's"
    second = result["engines"]["replica-2"]
    assert (second["requests"], second["moved_here"], second["output_tokens"]) == (2, 1, 10)
    assert second["ttft_ms"]["max"] == pytest.approx(300)
    shown = printed(render(result), 80)
    (row,) = [line.split() for line in shown.splitlines() if "replica-2 " in line]
    assert row == ["replica-2", "2", "1", "10", "200.00", "-", "300.00"]
    assert result["records"][0]["served"] == {"engine": "replica-10", "attempt": 1}


def test_a_server_with_one_engine_has_no_rows_of_engines():
    result = summarise([record(0), record(1, served=Served("a", 1))], [0.0], None, CONFIG)
    assert result["engines"] is None and "moved here" not in printed(render(result))
    assert summarise([], [0.0], None, CONFIG)["engines"] is None


def test_goodput_counts_failed_requests_in_the_share():
    records = [record(0), record(1, ttft=0.5), record(2, error="timeout"), record(3)]
    result = summarise(records, [0.0], parse_slo("ttft=200ms"), CONFIG)
    assert result["goodput"]["share"] == 0.5
    assert result["goodput"]["requests_per_s"] == pytest.approx(2 / result["duration_s"])


def test_a_run_whose_requests_left_late_is_invalid_and_says_so():
    result = summarise([record(i, lag=0.006) for i in range(5)], [0.0], None, CONFIG)
    assert not result["valid"]
    assert "requests left late: 6.0 ms at most exceeds 5.0 ms" in result["invalid_reasons"][0]
    assert "INVALID" in printed(render(result))


def test_a_run_whose_event_loop_woke_late_is_invalid():
    assert not summarise([record(0)], [0.006], None, CONFIG)["valid"]
    assert summarise([record(0)], [0.004], None, CONFIG)["valid"]


def test_lag_below_a_hundredth_of_the_median_ttft_is_tolerated():
    slow = [record(i, ttft=2.0, lag=0.019) for i in range(5)]
    assert summarise(slow, [0.019], None, CONFIG)["valid"]
    assert not summarise([record(i, ttft=2.0, lag=0.021) for i in range(5)], [0.0], None, CONFIG)["valid"]


def test_one_late_wake_up_in_a_thousand_does_not_spoil_a_run():
    assert summarise([record(0)], [0.5] + [0.0] * 999, None, CONFIG)["valid"]


def test_unknown_token_counts_are_said_to_be_unknown():
    result = summarise([record(0, output_tokens=None)], [0.0], parse_slo("itl=20ms"), CONFIG)
    assert result["throughput"]["output_tokens_per_s"] is None
    assert result["goodput"]["share"] is None
    assert "does not report token counts" in printed(render(result))


def test_a_run_in_which_everything_failed_still_has_a_report():
    result = summarise([record(0, error="connect", detail="refused", chunks_s=())], [], None, CONFIG)
    assert result["metrics"]["ttft_ms"]["p50"] is None
    assert "1 x connect: refused" in printed(render(result))


def test_comparison_gives_b_over_a_and_names_what_differs(tmp_path):
    a = summarise([record(i) for i in range(4)], [0.0], None, CONFIG)
    b = summarise([record(i, ttft=0.05) for i in range(4)], [0.02], None, {**CONFIG, "seed": 1})
    (tmp_path / "a.json").write_text(json.dumps(a))
    a = read_result(str(tmp_path / "a.json"))
    ratios = {what: ratio for what, _, _, ratio in rows(a, b)}
    assert ratios["TTFT p50 (ms)"] == pytest.approx(0.5)
    assert ratios["TPOT p50 (ms)"] == pytest.approx(1.0)
    found = "\n".join(warnings(a, b))
    assert "different seed: 0 and 1" in found
    assert "b is INVALID" in found
    assert "0.500" in printed(render_comparison(a, b))


def test_the_reason_why_a_percentile_is_missing_stands_there_once():
    result = summarise([record(i) for i in range(10)], [0.0], None, CONFIG)
    told = printed(render(result))
    assert told.count("P95 needs 20") == 1 and "unknown" not in told
    assert warnings(result, result).count(TOO_FEW) == 1


def test_no_figure_is_cut_at_80_columns():
    slow = [record(i, ttft=1234.5678, output_tokens=5) for i in range(1000)]
    lines = printed(render(summarise(slow, [0.0], None, CONFIG)), 80).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    shown = next(line for line in lines if "TTFT" in line).split()
    assert shown == ["TTFT", *["1,234,568"] * 5, "1,000"]
    assert next(line for line in lines if "TPOT" in line).split() == ["TPOT", *["10.00"] * 5, "1,000"]


def test_a_comparison_has_whole_names_and_figures_at_80_columns():
    named = {**CONFIG, "model": "some-organisation/A-Model-of-32B-Parameters-Instruct-FP8"}
    result = summarise([record(i, ttft=1234.5678) for i in range(100)], [0.0], None, named)
    told = printed(render_comparison(result, result), 80)
    assert "…" not in told and told.count("1,234,567.80") == 6


def test_comparing_something_else_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a file written by engine bench"):
        read_result(str(tmp_path / "x.json"))
