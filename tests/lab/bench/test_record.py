from __future__ import annotations

from dataclasses import replace

import pytest

from engine_lab.bench.record import RequestRecord

LATE = RequestRecord(
    index=0,
    scheduled_s=10.0,
    sent_s=12.0,
    done_s=13.5,
    chunks_s=(13.0, 13.1, 13.3),
    end_s=13.4,
    output_tokens=3,
)


def test_latency_counts_from_the_time_a_request_was_due_not_from_when_it_left():
    assert LATE.ttft_ms == pytest.approx(3000)
    assert LATE.e2e_ms == pytest.approx(3400)


def test_tpot_divides_the_decode_window_by_tokens_whatever_the_number_of_chunks():
    assert LATE.tpot_ms == pytest.approx(200)
    assert replace(LATE, output_tokens=9).tpot_ms == pytest.approx(50)


def test_gaps_between_chunks_are_not_passed_off_as_gaps_between_tokens():
    speculated = replace(LATE, output_tokens=9)
    assert speculated.inter_chunk_ms == pytest.approx((100, 200))
    assert [value for value, _ in speculated.itl_samples] == pytest.approx([25, 50])
    assert [weight for _, weight in speculated.itl_samples] == [4, 4]


def test_gaps_of_a_stream_with_a_token_a_chunk_are_itl():
    assert [value for value, _ in LATE.itl_samples] == pytest.approx([100, 200])


def test_without_a_token_count_nothing_per_token_is_claimed():
    unknown = replace(LATE, output_tokens=None)
    assert unknown.tpot_ms is None
    assert unknown.itl_samples == ()
    assert unknown.inter_chunk_ms == pytest.approx((100, 200))


def test_one_token_has_a_ttft_and_no_tpot():
    single = replace(LATE, chunks_s=(13.0,), output_tokens=1)
    assert single.ttft_ms == pytest.approx(3000)
    assert single.tpot_ms is None


def test_a_failed_request_has_no_ttft():
    failed = RequestRecord(index=0, scheduled_s=1.0, sent_s=1.0, done_s=2.0, error="http_500")
    assert not failed.ok
    assert failed.ttft_ms is None
    assert failed.e2e_ms == pytest.approx(1000)
