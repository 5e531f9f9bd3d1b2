from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from statistics import stdev

import pytest

from engine_lab.bench.distribution import parse_distribution
from engine_lab.bench.pattern import parse_pattern
from engine_lab.bench.workload import Workload, arrivals, random_text

BASE = Workload(
    prompt_tokens=parse_distribution("50"),
    output_tokens=parse_distribution("uniform:5,9"),
    shared_prefix=0.0,
    chars_per_token=4.0,
    nonce="n1",
    seed=0,
    text=random_text(0, 5000),
)


def prompts(workload: Workload, count: int = 8, stream: str = "measured") -> list:
    return [request.prompt for request in islice(workload.requests(stream), count)]


def common(texts: list) -> int:
    """Length of the beginning that all have in common."""
    return next((i for i, items in enumerate(zip(*texts)) if len(set(items)) > 1), min(map(len, texts)))


def test_the_same_seed_and_nonce_give_the_same_requests():
    assert list(islice(BASE.requests(), 8)) == list(islice(BASE.requests(), 8))


def test_prompts_have_the_length_asked_for():
    assert {len(prompt) for prompt in prompts(BASE)} == {200}


def test_the_shared_part_is_shared_by_all_and_the_rest_by_none():
    half = prompts(replace(BASE, shared_prefix=0.5))
    assert {len(prompt) for prompt in half} == {200}
    # The tags of different requests begin alike ("n1 measured 0: "), hence the slack.
    assert 100 <= common(half) <= 115
    assert len({prompt[115:] for prompt in half}) == 8
    assert len(set(prompts(replace(BASE, shared_prefix=1.0)))) == 1


def test_warmup_shares_the_prefix_and_nothing_else():
    workload = replace(BASE, shared_prefix=0.5)
    assert 100 <= common(prompts(workload, 1) + prompts(workload, 1, "warmup")) < 110


def test_another_nonce_shares_no_beginning_with_an_earlier_run():
    workload = replace(BASE, shared_prefix=0.5)
    assert common(prompts(workload, 1) + prompts(replace(workload, nonce="n2"), 1)) <= 1


def test_token_ids_have_exact_lengths_and_an_exact_shared_part():
    ids = prompts(replace(BASE, vocab_size=1000, shared_prefix=0.4))
    assert {len(prompt) for prompt in ids} == {50}
    assert all(256 <= token < 1000 for prompt in ids for token in prompt)
    assert common([list(prompt) for prompt in ids]) == 20
    other = prompts(replace(BASE, vocab_size=1000, shared_prefix=0.4, nonce="n2"), 1)
    assert common([list(ids[0]), list(other[0])]) <= 2


def test_a_text_shorter_than_the_prompt_starts_over():
    (prompt,) = prompts(replace(BASE, text="abc"), 1)
    assert len(prompt) == 200
    assert "abcabcabc" in prompt or "bcabca" in prompt


def test_poisson_arrivals_keep_the_rate_and_vary():
    times = list(islice(arrivals(20.0, seed=1), 4001))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.06)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # of an exponential distribution they are equal


@pytest.mark.parametrize(
    ("text", "deviation"), [("constant", 0.0), ("gamma:4", 0.5), ("gamma:0.25", 2.0), ("burst:5", 2.0)]
)
def test_a_pattern_keeps_the_rate_and_has_its_own_spread(text, deviation):
    times = list(islice(arrivals(20.0, 1, parse_pattern(text)), 20_001))
    gaps = [20.0 * (b - a) for a, b in pairwise(times)]
    assert times[-1] == pytest.approx(1000, rel=0.06)
    assert stdev(gaps) == pytest.approx(deviation, rel=0.05, abs=1e-6)
    assert str(parse_pattern(text)) == text


def test_in_a_ramp_the_rate_grows_evenly():
    times = list(islice(arrivals(10.0, 0, parse_pattern("constant"), ramp_s=20.0), 300))
    assert sum(time <= 10.0 for time in times) == pytest.approx(25, abs=1)
    assert sum(time <= 20.0 for time in times) == pytest.approx(100, abs=1)
    assert times[-1] - times[-2] == pytest.approx(0.1)


def test_classes_share_no_prompts():
    ids = replace(BASE, vocab_size=1000)
    found = [prompts(replace(ids, service_class=name), 1)[0] for name in ("chat", "batch")]
    assert common([list(prompt) for prompt in found]) <= 2


def test_each_of_several_prefixes_is_shared_by_a_part_of_the_prompts():
    found = prompts(replace(BASE, shared_prefix=0.8, prefixes=3), 40)
    assert len({prompt[:160] for prompt in found}) == 3 and len(set(found)) == 40
