"""Exporter ``webhook``: posts alerts of the engine's own rules to a URL, in the form of Alertmanager's webhooks.

https://prometheus.io/docs/alerting/latest/configuration/#webhook_config. The rules are those of ``engine alerts``, but
for the one that says that the server does not answer.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from engine.contracts.counters import Metric, Reading
from engine.contracts.events import Event
from engine.contracts.provider import BuildContext
from engine_lab.alerts.evaluation import FIRING, Evaluator, Finding
from engine_lab.alerts.history import History, scrape_of
from engine_lab.alerts.rules import RuleOptions, names, rules
from engine_lab.shared.live import by_engine, samples_of
from engine_plugins.exporter.config import WebhookConfig, read_headers
from engine_plugins.exporter.exposition import counted, page
from engine_plugins.exporter.outbox import Outbox

NEVER_ENDED = "0001-01-01T00:00:00Z"
"""``endsAt`` of an alert that still fires."""
SENT = Metric("counter", "engine_webhook_sent_total", "notifications", "Notifications that were taken.")
DROPPED = Metric("counter", "engine_webhook_dropped_total", "notifications", "Notifications that were not.")


class WebhookExporter:
    """The plugin: a :class:`~engine.contracts.exporter.ScrapedExporter`, which counts what was sent and dropped."""

    def __init__(self, config: WebhookConfig, context: BuildContext) -> None:
        server = context.settings.server
        self._labels = {"model": context.model.name, "instance": f"{server.host}:{server.port}"}
        self._rules = rules(RuleOptions(config.slo, config.objective, config.rag))
        self._readings: Callable[[], Sequence[Reading]] = tuple
        self._names = names(self._rules)
        self._engines: dict[str, tuple[History, Evaluator]] = {}
        """What each engine's rules are evaluated on, by its id."""
        self._firing: dict[str, dict[str, Any]] = {}
        self._every_s, self._repeat_s, self._told_s = config.every_s, config.repeat_s, 0.0
        headers = read_headers("exporter.webhook.headers_file", config.headers_file)
        self.outbox = Outbox(config.url, self._body, headers=headers, timeout_s=config.timeout_s)
        self._closed = threading.Event()
        self._timer: threading.Thread | None = None

    def watch(self, readings: Callable[[], Sequence[Reading]]) -> None:
        self._readings = readings

    def export(self, events: Sequence[Event]) -> None:
        if self._timer is None:
            self._timer = threading.Thread(target=self._run, name="webhook", daemon=True)
            self._timer.start()

    def render(self) -> str:
        sent, dropped = self.outbox.sent, self.outbox.dropped
        return page((counted(SENT, sent), counted(DROPPED, dropped)), {"model": self._labels["model"]})

    def close(self) -> None:
        self._closed.set()
        if self._timer is not None:
            self._timer.join()
        self.outbox.close()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self.evaluate(time.monotonic(), time.time())

    def evaluate(self, at_s: float, unix_s: float) -> None:
        """Tell what began or ceased to fire, and what still does, once in a while."""
        engines = by_engine(self._readings())
        alerts = [
            self._alert(found, {"engine": engine} if len(engines) > 1 else {}, unix_s - at_s)
            for engine, readings in engines.items()
            for found in self._evaluated(engine, at_s, readings)
            if found.state == FIRING
        ]
        firing = {alert["fingerprint"]: alert for alert in alerts}
        ended = [alert for name, alert in self._firing.items() if name not in firing]
        is_news = firing.keys() != self._firing.keys()
        if is_news or (firing and at_s - self._told_s >= self._repeat_s):
            resolved = [alert | {"status": "resolved", "endsAt": rfc3339(unix_s)} for alert in ended]
            self.outbox.put([*firing.values(), *resolved])
            self._told_s = at_s
        self._firing = firing

    def _evaluated(self, engine: str, at_s: float, readings: Sequence[Reading]) -> list[Finding]:
        if engine not in self._engines:
            self._engines[engine] = History(), Evaluator(self._rules)
        history, evaluator = self._engines[engine]
        history.add(at_s, scrape_of(samples_of(readings), self._names))
        return evaluator.evaluate(history)

    def _alert(self, found: Finding, of_engine: Mapping[str, str], offset_s: float) -> dict[str, Any]:
        """``offset_s``: what to add to the history's clock for Unix time."""
        rule = found.rule
        labels = {"alertname": rule.name, "severity": rule.severity, **rule.labels, **self._labels, **of_engine}
        return {
            "status": "firing",
            "labels": labels,
            "annotations": {"summary": rule.summary, "description": rule.advice, "value": f"{found.value:g}"},
            "startsAt": rfc3339(found.since_s + offset_s),
            "endsAt": NEVER_ENDED,
            "generatorURL": "",
            "fingerprint": hashlib.sha256(msgspec.json.encode(sorted(labels.items()))).hexdigest()[:16],
        }

    def _body(self, notifications: Sequence[list[dict[str, Any]]]) -> bytes:
        """Of the last notification: it says what there is now; what ended meanwhile is added."""
        last = {alert["fingerprint"]: alert for alerts in notifications for alert in alerts}
        alerts = list(last.values())
        is_firing = any(alert["status"] == "firing" for alert in alerts)
        common = [set(alert["labels"].items()) for alert in alerts]
        return msgspec.json.encode(
            {
                "version": "4",
                "groupKey": "{}:{instance=" + f'"{self._labels["instance"]}"' + "}",
                "truncatedAlerts": 0,
                "status": "firing" if is_firing else "resolved",
                "receiver": "webhook",
                "groupLabels": {"instance": self._labels["instance"]},
                "commonLabels": dict(sorted(set.intersection(*common))),
                "commonAnnotations": {},
                "externalURL": "",
                "alerts": alerts,
            }
        )


def rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
