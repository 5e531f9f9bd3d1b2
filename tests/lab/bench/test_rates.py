from __future__ import annotations

import itertools

import pytest
from tests.lab.bench.test_load import Server, VirtualTime, endless, ignore
from tests.lab.bench.test_main import FakeServer, measure
from tests.lab.bench.test_report import CONFIG, printed

from engine_lab.bench.load import Limit, closed_loop, open_loop
from engine_lab.bench.rates import knees, rates_below, render, row
from engine_lab.bench.result import summarise


def of_server(**config):
    """A row of a load on a server that takes a second a request, eight at once."""
    time = VirtualTime()
    server, limit = Server(time, 1.0, capacity=8), Limit(None, 20.0)
    rate, at_once = config.get("rate"), config.get("concurrency")
    if rate:
        times = (i / rate for i in itertools.count())
        load = open_loop(server, endless(), times, limit, time.clock, ignore, time.sleep)
    else:
        load = closed_loop(server, endless(), at_once, limit, time.clock, ignore, time.sleep)
    return row(summarise(time.run(load), [0.0], None, {**CONFIG, "rate": rate, "concurrency": at_once}))


def test_the_knees_of_a_server_are_where_more_load_brings_no_more_answers():
    closed = [of_server(concurrency=at_once) for at_once in (1, 2, 4, 8, 16)]
    assert [each["ended_per_s"] for each in closed] == pytest.approx([1, 2, 4, 8, 8], rel=0.06)
    rates = [of_server(rate=rate) for rate in (4.0, 7.5, 10.0)]
    assert [each["kept_up"] for each in rates] == [True, True, False]
    first, second = knees([*closed, *rates])
    assert (first["kind"], first["load"]) == ("closed loop", "8 at once")
    assert (second["kind"], second["load"]) == ("rates", "7.5/s")
    assert "may be above it" in knees(rates[:2])[0]["how"] and "may be above it" not in second["how"]
    assert knees(rates[2:])[0]["how"].startswith("none")


def test_the_knee_of_rates_says_how_many_came_which_chance_makes_fewer_than_the_rate():
    (knee,) = knees([of_server(rate=4.0) | {"came_per_s": 3.22, "ended_per_s": 3.08}])
    assert knee["load"] == "4/s" and "90% as fast as they come, or faster: 3.08 of 3.22/s that came" in knee["how"]


def test_rates_lie_denser_towards_saturation_which_is_the_last():
    rates = rates_below(1.0, 11.0, 5)
    gaps = [b - a for a, b in itertools.pairwise([1.0, *rates])]
    assert rates[-1] == pytest.approx(11.0) and gaps == sorted(gaps, reverse=True)


def test_a_sweep_saturates_the_server_and_then_keeps_rates_below_that():
    result = measure(FakeServer(), "--sweep", "2", "--requests", "8", "--output-tokens", "2", "--slo", "ttft=60s")
    closed = [each["concurrency"] for each in result["rows"] if each["concurrency"]]
    assert closed == [2**i for i in range(len(closed))] and len(closed) > 1
    most = max(each["ended_per_s"] for each in result["rows"] if each["concurrency"])
    rates = [each["rate"] for each in result["rows"]][len(closed) :]
    assert rates[1] == pytest.approx(most) and rates[2:] == pytest.approx(
        [most * 1.1**i for i in range(1, len(rates) - 1)]
    )
    assert all(each["kept_up"] for each in result["rows"][len(closed) + 1 : -1]) and len(rates) <= 7
    assert result["requests"] == {"sent": 8 * len(result["rows"]), "ok": 8 * len(result["rows"])}
    shown = printed(render(result), 80)
    assert "knee (closed loop)" in shown and "knee (rates)" in shown and "knee (limits)" in shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


def test_several_rates_are_a_row_each():
    result = measure(FakeServer(), "--rate", "200,400", "--requests", "6", "--output-tokens", "2")
    assert [each["load"] for each in result["rows"]] == ["200/s", "400/s"]
    assert result["steps"][0]["config"]["rate"] == 200
