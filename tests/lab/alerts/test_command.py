"""``engine alerts``, against a server's counters."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import msgspec
import pytest
import yaml
from rich.console import Console

from engine.cli.main import main
from engine.counters.engine import EngineCounters
from engine.testing.exporter import step_event
from engine_lab.alerts import main as alerts_main
from engine_lab.alerts.history import Scrape
from engine_lab.alerts.rules import RuleOptions, rules

QUICK = ["--seconds", "0.3", "--every", "0.1"]


class Page(BaseHTTPRequestHandler):
    engines: ClassVar[dict[str, bytes]] = {}
    """What the counters of each are."""

    def do_GET(self) -> None:
        pages = {f"/engine/counters?engine={name}": text for name, text in self.engines.items()}
        pages["/engine/fleet"] = msgspec.json.encode({"engines": [{"id": name} for name in self.engines]})
        text = pages.get(self.path, b"")
        self.send_response(200 if text else 404)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def page(**changes: float) -> bytes:
    counters = EngineCounters(4)
    counters.add([step_event(**changes)])
    return msgspec.json.encode({"metrics": counters.readings()})


def test_an_engine_that_is_well_ends_in_success(url, monkeypatch, capsys):
    monkeypatch.setattr(Page, "engines", {"default": page(waiting=0)})
    assert main(["alerts", "--url", url, *QUICK]) == 0
    shown = capsys.readouterr()
    assert "EngineKvFull" in shown.out and "firing" not in shown.out and shown.err == ""


def test_a_full_cache_is_said_with_its_value_and_in_the_exit_status(url, monkeypatch, capsys):
    monkeypatch.setattr(Page, "engines", {"default": page(kv_used=0.97, waiting=2)})
    assert main(["alerts", "--url", url, *QUICK]) == 3
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "firing" in line]
    assert line.split()[:4] == ["EngineKvFull", "firing", "(ticket)", "0.97"]


def test_of_several_engines_each_is_judged_and_named(url, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(Page, "engines", {"a": page(waiting=0), "b": page(kv_used=0.97, waiting=2)})
    assert main(["alerts", "--url", url, *QUICK]) == 3
    lines = capsys.readouterr().out.splitlines()
    (firing,) = [line for line in lines if "firing" in line]
    assert firing.split()[:5] == ["b", "EngineKvFull", "firing", "(ticket)", "0.97"]
    assert sum("EngineKvFull" in line for line in lines) == 2
    assert sum("EngineUnreachable" in line for line in lines) == 1, "that one is of the server"


def test_a_server_of_several_that_goes_away_is_away_once_and_comes_back():
    watched = alerts_main.Watched(rules(RuleOptions()), at_once=True)

    def unreachable() -> list[str]:
        found = [each for findings in watched.evaluate().values() for each in findings]
        return [each.state for each in found if each.rule.name == "EngineUnreachable"]

    for at_s, scrapes, state in (
        (0.0, {}, "firing"), (1.0, {"a": {}, "b": {}}, "ok"), (2.0, {}, "firing"), (3.0, {"a": {}, "b": {}}, "ok"),
    ):  # fmt: skip
        watched.add(at_s, scrapes)
        assert unreachable() == [state]
    assert list(watched.histories) == ["a", "b"]


def test_a_server_that_is_away_fires_and_says_why_once(capsys):
    assert main(["alerts", "--url", "http://127.0.0.1:9", *QUICK]) == 3
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "http://127.0.0.1:9/engine/fleet" in shown.err
    assert [line.split()[0] for line in shown.out.splitlines() if "firing" in line] == ["EngineUnreachable"]


def test_the_rules_are_a_file_for_prometheus(capsys):
    assert main(["alerts", "--rules", "--job", "llm", "--slo", "code", "--rag"]) == 0
    text = capsys.readouterr().out
    (group,) = yaml.safe_load(text)["groups"]
    names = {rule["alert"] for rule in group["rules"]}
    assert {"EngineTtftTail", "EnginePrefixHitsLow"} <= names
    assert 'up{job="llm"} == 0' in text and 'le="0.1"' in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--every", "0"], "--every"),
        (["--seconds", "1", "--every", "2"], "--seconds"),
        (["--objective", "1"], "--objective 1.0: expected a share between 0 and 1"),
        (["--job", 'a"b'], "--job"),
        (["--seconds", "nan"], "--seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, says, capsys):
    assert main(["alerts", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_rule_that_nearly_fires_says_what_it_lacks(url, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(Page, "engines", {"default": page(kv_used=0.97, waiting=0)})
    assert main(["alerts", "--url", url, *QUICK]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("EngineKvFull")]
    assert line.rstrip().split(maxsplit=3)[1:] == ["ok", "0.97", "not: engine_requests_waiting > 0"]


def test_burn_rates_share_a_row_that_says_how_long_was_watched(capsys):
    watched = alerts_main.Watched(rules(RuleOptions()), at_once=True)
    for second in (0.0, 25.0):
        late = {"engine_ttft_seconds_count": 160.0 * second, 'engine_ttft_seconds_bucket{le="0.5"}': 0.0}
        watched.add(second, {"a": late})
    Console(width=300).print(alerts_main.render(watched.evaluate(), watched.histories))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "EngineTtftBurnRate" in line]
    assert "firing (page)" in row and "1h, 6h, 24h, 3d: firing" in row and "Watched for 25 s" in row


def test_too_little_data_is_not_ok(url, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(Page, "engines", {"default": page(waiting=0)})
    assert main(["alerts", "--url", url, *QUICK]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "unknown" in lines["EngineTtftTail"] and "too little data" in lines["EngineTtftTail"]
    assert lines["EngineKvFull"].split()[1] == lines["EngineUnreachable"].split()[1] == "ok"


def test_watching_says_when_a_rule_begins_and_ceases_to_hold(monkeypatch, capsys):
    used = "engine_kv_used_ratio"

    async def scrapes(flags: object, metrics: object) -> AsyncIterator[tuple[float, dict[str, Scrape]]]:
        for minute, value in enumerate((0.5, 0.95, 0.95, 0.95, 0.5)):
            yield 60.0 * minute, {"default": {used: value, "engine_requests_waiting": 1.0}}
        raise KeyboardInterrupt

    monkeypatch.setattr(alerts_main, "_scrapes", scrapes)
    assert main(["alerts", "--watch"]) == 130
    lines = [line.split()[1:5] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["pending", "EngineKvFull", "(ticket,", "0.95):"],
        ["firing", "EngineKvFull", "(ticket,", "0.95):"],
        ["ok", "EngineKvFull", "(ticket,", "0.5):"],
    ]
