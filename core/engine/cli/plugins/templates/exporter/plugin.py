"""Exporter ``mine``: prints requests whose first token took too long, and how many there were."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.events import Event, RequestEvent
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineExporterConfig(SlotConfig):
    """The keys ``exporter.mine.<field>``."""

    over_ms: float = 500.0
    """TTFT from which on a request is slow."""

    def __post_init__(self) -> None:
        at_least("exporter.mine.over_ms", self.over_ms, 0)


@hookimpl
def engine_exporter() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.exporter.plugin:MineExporter",
            config=MineExporterConfig,
            doc="Prints requests whose first token took too long.",
        )
    ]


class MineExporter:
    """Lives in the process that answers HTTP requests; off the step path, in a thread of its own."""

    def __init__(self, config: MineExporterConfig, context: BuildContext) -> None:
        self._over_ms = config.over_ms
        self._requests = self._slow = 0

    def export(self, events: Sequence[Event]) -> None:
        """Take a batch of events, in order. An exporter that keeps raising is cut off."""
        for event in events:
            if isinstance(event, RequestEvent):
                self._requests += 1
                if event.ttft_ms > self._over_ms:
                    self._slow += 1
                    _print(f"{event.request_id}: {event.ttft_ms:.0f} ms, queued {event.queue_ms:.0f} ms")

    def close(self) -> None:
        """No further events come: flush what is buffered."""
        _print(f"{self._slow} of {self._requests} requests were slow")


def _print(line: str) -> None:
    print(f"mine: {line}", file=sys.stderr, flush=True)
