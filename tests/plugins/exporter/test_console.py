from __future__ import annotations

import io

import msgspec

from engine.contracts.events import DroppedEvent, FirstTokenEvent, PrefixCacheEvent, TokensEvent
from engine.contracts.exporter import Exporter
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, request_event, step_event
from engine_plugins.exporter.config import ConsoleConfig
from engine_plugins.exporter.console import ConsoleExporter, median

CONTEXT = build_context()


def make(every_s: float = 10.0) -> tuple[ConsoleExporter, io.StringIO]:
    out = io.StringIO()
    return ConsoleExporter(ConsoleConfig(every_s=every_s), CONTEXT, out), out


class TestConformance(ExporterConformance):
    def make(self) -> ConsoleExporter:
        return make()[0]

    def written(self, exporter: Exporter) -> str:
        assert isinstance(exporter, ConsoleExporter) and isinstance(exporter._out, io.StringIO)
        return exporter._out.getvalue()


def test_a_line_comes_when_the_interval_is_over_and_not_before():
    console, out = make()
    console.export([step_event(100.0), step_event(109.9)])
    assert out.getvalue() == ""
    console.export([step_event(110.0)])
    assert out.getvalue().count("\n") == 1
    console.export([step_event(119.0)])
    assert out.getvalue().count("\n") == 1


def test_a_line_says_what_happened_in_its_interval():
    console, out = make()
    console.export(
        [
            step_event(0.0, num_prefill_tokens=90, num_decode_tokens=10, drafted=4, accepted=3),
            PrefixCacheEvent(1.0, queries=100, hits=25),
            FirstTokenEvent(1.0, "r", 12.34),
            TokensEvent(2.0, "r", 1, 2.5),
            request_event(3.0),
            request_event(4.0, "abort"),
            DroppedEvent(5.0, 3),
            step_event(10.0, running=7, num_prefill_tokens=1_000_000),
        ]
    )
    assert out.getvalue() == (
        "engine: 1 abort, 1 stop | 3 running 1 waiting kv 25% | prefill 9 decode 1 tok/s | ttft p50 12.3 ms"
        " | itl p50 2.50 ms | cached 25% | accepted 75% | 3 events dropped\n"
    )


def test_of_several_engines_each_has_a_line_and_what_is_the_servers_is_in_the_first():
    console, out = make()
    for at_s, engine, running in ((0.0, "replica-0", 1), (1.0, "replica-10", 5), (2.0, "replica-2", 3)):
        console.export([msgspec.structs.replace(step_event(at_s, running=running), engine=engine)])
    console.export([msgspec.structs.replace(FirstTokenEvent(3.0, "r", 7.0), engine="replica-2"), DroppedEvent(5.0, 3)])
    console.export([msgspec.structs.replace(step_event(10.0), engine="replica-2")])
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("engine replica-0: ") and "1 running" in first and first.endswith("3 events dropped")
    assert second.startswith("engine replica-2: ") and "3 running" in second and "ttft p50 7.0 ms" in second
    assert third.startswith("engine replica-10: ") and "5 running" in third and "dropped" not in third


def test_closing_prints_what_was_not_printed_yet_once():
    console, out = make()
    console.export([step_event(0.0), request_event(2.0)])
    console.close()
    console.close()
    assert out.getvalue().count("\n") == 1
    assert "1 stop" in out.getvalue()


def test_the_median_weighs_tokens():
    assert median([(1.0, 1), (9.0, 1), (2.0, 5)]) == 2.0
    assert median([(1.0, 1), (9.0, 3)]) == 9.0
