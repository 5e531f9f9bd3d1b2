from __future__ import annotations

from dataclasses import replace

import pytest

from engine_lab.bench.record import RequestRecord
from engine_lab.bench.slo import parse_slo

RECORD = RequestRecord(0, 0.0, 0.0, 0.4, chunks_s=(0.1, 0.12, 0.3), end_s=0.3, output_tokens=3)


def test_limits_are_read_in_milliseconds_and_seconds():
    assert parse_slo("ttft=200ms, itl=20ms,e2e=1.5s").limits_ms == (
        ("ttft", 200.0),
        ("itl", 20.0),
        ("e2e", 1500.0),
    )


@pytest.mark.parametrize("text", ["", "ttft", "ttft=200", "ttft=-1ms", "tfft=1ms", "ttft=1ms,ttft=2ms", "ttft=xs"])
def test_what_is_not_a_limit_is_refused(text):
    with pytest.raises(ValueError, match="expected ttft, itl, tpot, e2e"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        *(("ttft=100ms", True), ("ttft=99ms", False), ("tpot=100ms", True), ("tpot=99ms", False)),
        *(("itl=180ms", True), ("itl=179ms", False), ("e2e=301ms", True), ("ttft=1s,e2e=299ms", False)),
    ],
)
def test_a_request_is_good_when_it_keeps_every_limit(slo, met):
    assert parse_slo(slo).met_by(RECORD) is met


def test_a_failed_request_is_not_good():
    assert parse_slo("ttft=9s").met_by(replace(RECORD, error="timeout")) is False


def test_a_limit_per_token_is_unknown_without_a_token_count():
    unknown = replace(RECORD, output_tokens=None)
    assert parse_slo("itl=1s").met_by(unknown) is None
    assert parse_slo("ttft=100ms").met_by(unknown) is True
    assert parse_slo("itl=1s,ttft=1ms").met_by(unknown) is False
