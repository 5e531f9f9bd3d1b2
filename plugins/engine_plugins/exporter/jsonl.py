"""Exporter ``jsonl``: every event as one JSON object per line, appended to a file.

A line is the event's fields plus ``type`` (``step``, ``tokens``, ``request`` ...). No event holds prompt or
output text. Lines reach the file batch by batch, so a reader sees whole lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.contracts.events import Event
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import JsonlConfig


class JsonlExporter:
    """The plugin. Raises ``ValueError`` when the file cannot be opened for appending."""

    def __init__(self, config: JsonlConfig, context: BuildContext) -> None:
        try:
            self._file = open(config.path, "ab")  # noqa: SIM115 - open until close()
        except OSError as error:
            raise ValueError(
                f"exporter.jsonl.path={config.path}: expected a file that can be written ({error.strerror}); "
                "choose another with exporter.jsonl.path=FILE"
            ) from error
        self._encoder = msgspec.json.Encoder()

    def export(self, events: Sequence[Event]) -> None:
        self._file.write(self._encoder.encode_lines(events))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
