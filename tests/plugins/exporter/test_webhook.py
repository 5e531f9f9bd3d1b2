"""Alerts, as somebody on call receives them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.contracts.events import DroppedEvent
from engine.counters.engine import EngineCounters
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, Fed, step_event
from engine_plugins.exporter.config import WebhookConfig
from engine_plugins.exporter.webhook import WebhookExporter

from .receiver import Reply, receiving

START_S = 1_700_000_000.0
FULL, FREE = step_event(kv_used=0.95, waiting=3), step_event(kv_used=0.5, waiting=0)


class Alerting(Fed):
    exporter: WebhookExporter

    def evaluate(self, at_s: float, unix_s: float) -> None:
        self.exporter.evaluate(at_s, unix_s)


def plain(url: str, **config: Any) -> WebhookExporter:
    """Its own clock does not tick during a test."""
    return WebhookExporter(WebhookConfig(url=url, every_s=3600.0, **config), build_context())


def make(url: str, **config: Any) -> Alerting:
    return Alerting(plain(url, **config))


class TestConformance(ExporterConformance):
    def make(self) -> WebhookExporter:
        return plain("http://127.0.0.1:9")


def test_an_alert_is_told_when_it_begins_and_when_it_ends():
    with receiving() as server:
        exporter = make(server.url)
        for minute, event in enumerate((FREE, FULL, FULL, FULL, FULL, FREE)):
            exporter.export([event])
            exporter.evaluate(60.0 * minute, START_S + 60.0 * minute)
            server.wait({3: 1, 5: 2}.get(minute, 0))
        exporter.close()
        first, second = (json.loads(posted.body) for posted in server.posted)
        assert "engine_webhook_sent_total" in exporter.render()
    (alert,) = first["alerts"]
    assert (first["version"], first["status"], alert["status"]) == ("4", "firing", "firing")
    assert alert["labels"] == first["commonLabels"] == {
        "alertname": "EngineKvFull", "severity": "ticket", "model": build_context().model.name,
        "instance": "127.0.0.1:8000",
    }  # fmt: skip
    assert alert["annotations"]["value"] == "0.95" and alert["annotations"]["summary"].startswith("The KV cache")
    assert (alert["startsAt"], alert["endsAt"]) == ("2023-11-14T22:14:20Z", "0001-01-01T00:00:00Z"), "it held for 2 min"
    (ended,) = second["alerts"]
    assert (second["status"], ended["status"], ended["endsAt"]) == ("resolved", "resolved", "2023-11-14T22:18:20Z")
    assert (ended["fingerprint"], ended["startsAt"]) == (alert["fingerprint"], alert["startsAt"])
    assert set(first) == {
        "version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels", "commonLabels",
        "commonAnnotations", "externalURL", "alerts",
    }  # fmt: skip


def test_rules_hold_for_each_of_several_engines_and_an_alert_says_which():
    """Were their counters in one history, the last engine's would hide those of the others."""
    with receiving() as server:
        exporter = plain(server.url)
        engines = {name: EngineCounters(4, name) for name in ("replica-0", "replica-1")}
        exporter.watch(lambda: [reading for each in engines.values() for reading in each.readings()])
        for minute in range(4):
            engines["replica-0"].add([FULL])
            engines["replica-1"].add([FULL if minute == 3 else FREE])
            exporter.evaluate(60.0 * minute, START_S + 60.0 * minute)
        server.wait(1)
        exporter.close()
        (posted,) = server.posted
    (alert,) = json.loads(posted.body)["alerts"]
    assert (alert["labels"]["alertname"], alert["labels"]["engine"]) == ("EngineKvFull", "replica-0")
    assert alert["startsAt"] == "2023-11-14T22:13:20Z", "since the first minute"


def test_what_still_fires_is_told_again_once_in_a_while():
    with receiving() as server:
        exporter = make(server.url, repeat_s=600.0)
        exporter.export([FULL])
        for minute in range(14):
            exporter.evaluate(60.0 * minute, START_S + 60.0 * minute)
            server.wait({2: 1, 12: 2}.get(minute, 0))
        exporter.close()
        assert [json.loads(posted.body)["status"] for posted in server.posted] == ["firing", "firing"]


def test_several_alerts_are_told_at_once_and_a_busy_receiver_is_tried_again():
    with receiving(Reply(503, headers={"Retry-After": "0"})) as server:
        exporter = make(server.url)
        exporter.export([FULL])
        exporter.evaluate(0.0, START_S)
        exporter.evaluate(60.0, START_S + 60)
        exporter.export([DroppedEvent(1.0, 5)])
        exporter.evaluate(120.0, START_S + 120)
        refused, taken = server.wait(2)
        exporter.close()
    alerts = json.loads(taken.body)["alerts"]
    assert refused.body == taken.body
    assert [alert["labels"]["alertname"] for alert in alerts] == ["EngineKvFull", "EngineEventsDropped"]


def test_an_engine_that_is_well_tells_nobody():
    with receiving() as server:
        exporter = make(server.url)
        for minute in range(10):
            exporter.export([FREE])
            exporter.evaluate(60.0 * minute, START_S)
        exporter.close()
        assert server.posted == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"url": "nobody"}, r"exporter\.webhook\.url=nobody: expected an http or https URL"),
        ({"slo": "fast"}, r"exporter\.webhook\.slo=fast"),
        ({"objective": 1.0}, r"exporter\.webhook\.objective=1\.0: expected a share between 0 and 1"),
        ({"every_s": 0.1}, r"exporter\.webhook\.every_s=0\.1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        WebhookConfig(**config)
