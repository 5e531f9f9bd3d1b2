from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine.contracts.events import Event
from engine.contracts.exporter import Exporter
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, one_of_each
from engine_plugins.exporter.config import JsonlConfig
from engine_plugins.exporter.jsonl import JsonlExporter

CONTEXT = build_context()


class TestConformance(ExporterConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.count = 0

    def make(self) -> JsonlExporter:
        self.count += 1
        return JsonlExporter(JsonlConfig(path=str(self.folder / f"events-{self.count}.jsonl")), CONTEXT)

    def written(self, exporter: Exporter) -> str:
        assert isinstance(exporter, JsonlExporter)
        return Path(exporter._file.name).read_text()


def test_lines_read_back_as_the_events_they_were(tmp_path):
    path = tmp_path / "events.jsonl"
    exporter = JsonlExporter(JsonlConfig(path=str(path)), CONTEXT)
    exporter.export(one_of_each(1.0))
    exporter.export(one_of_each(2.0))
    exporter.close()
    decode = msgspec.json.Decoder(Event).decode_lines
    assert tuple(decode(path.read_bytes())) == (*one_of_each(1.0), *one_of_each(2.0))


def test_a_batch_can_be_read_before_the_exporter_is_closed(tmp_path):
    path = tmp_path / "events.jsonl"
    exporter = JsonlExporter(JsonlConfig(path=str(path)), CONTEXT)
    exporter.export(one_of_each())
    lines = path.read_text().splitlines()
    exporter.close()
    assert [json.loads(line)["type"] for line in lines[:3]] == ["admitted", "prefix_cache", "step"]


def test_earlier_lines_are_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        exporter = JsonlExporter(JsonlConfig(path=str(path)), CONTEXT)
        exporter.export(one_of_each()[:1])
        exporter.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    path = tmp_path / "missing" / "events.jsonl"
    with pytest.raises(ValueError, match=r"exporter\.jsonl\.path=.*missing.*No such file"):
        JsonlExporter(JsonlConfig(path=str(path)), CONTEXT)
