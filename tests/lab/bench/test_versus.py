from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.lab.bench.test_main import FakeServer, parse_options
from tests.lab.bench.test_report import CONFIG, printed, record

from engine.cli.main import main
from engine_lab.bench import main as bench
from engine_lab.bench.result import summarise as summarise_run
from engine_lab.bench.versus import render, summarise

OPTIONS = parse_options(["--versus", "http://b", "--pairs", "8"])


def burst(ttft: float, lag_s: float = 0.0):
    return summarise_run([record(i, ttft=ttft) for i in range(20)], [lag_s], None, CONFIG)


def of(pairs):
    return summarise(pairs, OPTIONS, (CONFIG, CONFIG), interrupted=False)


def test_a_winner_is_named_only_if_the_interval_of_paired_ratios_leaves_out_1():
    noise = [1.0, 1.3, 0.9, 1.1, 1.2, 0.8, 1.05, 0.95]
    apart = of([(burst(0.1 * x), burst(0.15 * x * y)) for x, y in zip(noise, [1.0, 1.02, 0.98, 1.01] * 2)])
    by_label = {found["label"]: found for found in apart["figures"]}
    ttft, itl = by_label["TTFT P50 (ms)"], by_label["ITL mean (ms)"]
    assert ttft["low"] < 1.5 < ttft["high"] and ttft["verdict"] == "a is better"
    assert itl["verdict"] == "no winner"
    same = of([(burst(0.1 * x), burst(0.1 * y)) for x, y in zip(noise, noise[::-1])])
    assert {found["verdict"] for found in same["figures"]} == {"no winner"}
    late = of([(burst(0.1), burst(0.15, lag_s=0.02)) for _ in range(8)])
    assert not late["valid"] and {found["verdict"] for found in late["figures"]} == {"invalid"}
    for result in (apart, late):
        shown = printed(render(result), 80)
        assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


def test_both_servers_get_the_same_bursts_in_turns_with_standard_fields_only():
    fakes, came = [FakeServer(), FakeServer(usage=False)], []

    def noting(side):
        @web.middleware
        async def noted(request, handler):
            if request.method == "POST" and (await request.json())["stream"]:
                came.append(side)
            return await handler(request)

        return noted

    async def run():
        apps = [fake.app() for fake in fakes]
        for side, app in zip("ab", apps):
            app.middlewares.append(noting(side))
        async with TestServer(apps[0]) as a, TestServer(apps[1]) as b:
            argv = ["--url", str(a.make_url("")), "--versus", str(b.make_url("/v1")), "--pairs", "6", "--nonce", "n"]
            return await bench.measure(parse_options([*argv, "--requests", "3", "--warmup", "0"]))

    result = asyncio.run(run())
    bursts = ["".join(came[i : i + 3]) for i in range(0, 36, 3)]
    assert sorted(bursts) == ["aaa"] * 6 + ["bbb"] * 6
    assert all({x, y} == {"aaa", "bbb"} for x, y in zip(bursts[::2], bursts[1::2]))
    asked = [[body for body in fake.bodies if body["stream"]] for fake in fakes]
    for a, b in zip(*asked, strict=True):
        assert a["messages"][0]["content"].replace("na ", "") == b["messages"][0]["content"].replace("nb ", "")
        assert set(a) == set(b) <= {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    labels = {found["label"] for found in result["figures"]}
    assert "TTFT P50 (ms)" in labels and "ITL mean (ms)" not in labels, "b does not count tokens"
    assert result["pairs"] == 6 and result["requests"]["ok"] == 36


@pytest.mark.parametrize("pairs", ["5", "x"])
def test_too_few_pairs_for_an_interval_are_refused(capsys, pairs):
    assert main(["bench", "--versus", "http://b", "--pairs", pairs]) == 2
    assert "expected a whole number of at least 6" in capsys.readouterr().err
