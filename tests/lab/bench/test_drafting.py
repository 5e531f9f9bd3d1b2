"""What ``engine bench`` says of speculative decoding."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from engine_lab.bench.compare import rows
from engine_lab.bench.record import Drafting, RequestRecord
from engine_lab.bench.report import render
from engine_lab.bench.result import summarise
from engine_lab.bench.target import Target
from engine_lab.bench.workload import BenchRequest

CONFIG = {"model": "m", "url": "http://x", "load": "closed loop, 1 at once", "prompt_length_from": "test"}
EVENT = RequestRecord(
    index=0,
    scheduled_s=0.0,
    sent_s=0.0,
    done_s=0.14,
    chunks_s=(0.1, 0.11, 0.14),
    end_s=0.14,
    prompt_tokens=4,
    output_tokens=6,
    drafting=Drafting(6, 3, 2, 1.0, 20.0),
)


def printed(result):
    out = io.StringIO()
    Console(file=out, width=120).print(render(result))
    return out.getvalue()


def test_itl_per_token_is_exact_where_chunks_say_what_they_carry():
    exact = replace(EVENT, chunk_tokens=(1, 2, 6))
    assert [sample for pair in exact.itl_samples for sample in pair] == pytest.approx([10, 1, 7.5, 4])
    assert [value for value, _ in EVENT.itl_samples] == pytest.approx([10 / 2.5, 30 / 2.5])
    assert exact.inter_chunk_ms == EVENT.inter_chunk_ms == pytest.approx((10, 30))


def test_acceptance_accepted_length_and_cost_are_in_table_and_json():
    other = replace(EVENT, index=1, drafting=Drafting(2, 0, 2, 3.0, 20.0))
    result = summarise([EVENT, other], [0.0], None, CONFIG)
    wanted = {"drafted": 8, "accepted": 3, "chains": 4, "acceptance_rate": 3 / 8, "mean_accepted_length": 1.75}
    assert result["drafting"] == {**wanted, "draft_share": pytest.approx(0.1)}
    assert result["records"][0]["drafting"]["chains"] == 2
    shown = printed(result)
    assert "drafts      37.5% of 8 accepted, mean accepted length 1.75, 10.0% of decoding spent on them" in shown
    assert "ITL per token" in shown and "ITL per event" in shown


def test_a_server_that_says_nothing_of_drafts_is_not_said_to_have_none():
    silent = replace(EVENT, drafting=None)
    assert summarise([EVENT, silent], [0.0], None, CONFIG)["drafting"] is None
    none = summarise([replace(EVENT, drafting=Drafting(0, 0, 0, 0.0, 20.0))], [0.0], None, CONFIG)
    assert none["drafting"]["acceptance_rate"] is None and "drafts" not in printed(none)


def test_two_runs_are_compared_by_acceptance_where_both_have_it():
    a, b = (summarise([replace(EVENT, drafting=Drafting(6, n, 2, 1.0, 20.0))], [0.0], None, CONFIG) for n in (2, 4))
    found = {what: (x, y, ratio) for what, x, y, ratio in rows(a, b)}
    assert found["mean accepted length"] == (2.0, 3.0, 1.5)
    del b["drafting"]  # as an earlier version wrote it
    assert "mean accepted length" not in [what for what, *_ in rows(a, b)]


def test_usage_in_every_chunk_is_only_asked_for_when_wanted():
    request = BenchRequest(0, "hi", 4)
    assert Target("http://x", "m", "chat").body(request)["stream_options"] == {"include_usage": True}
    asked = Target("http://x", "m", "chat", usage_per_chunk=True).body(request)["stream_options"]
    assert asked == {"include_usage": True, "continuous_usage_stats": True}
