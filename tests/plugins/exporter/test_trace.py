from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from engine.contracts.exporter import Exporter, Transcript
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, one_of_each, request_event
from engine_lab.shared.simulation.traces.reading import read_trace
from engine_plugins.exporter.config import TraceConfig
from engine_plugins.exporter.trace import TraceExporter

CONTEXT = build_context()
SIZE = CONTEXT.block_size
SHARED = list(range(70000, 70000 + 2 * SIZE))


class TestConformance(ExporterConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.count = 0

    def make(self) -> TraceExporter:
        self.count += 1
        return TraceExporter(TraceConfig(path=str(self.folder / f"trace-{self.count}.jsonl")), CONTEXT)

    def written(self, exporter: Exporter) -> list[str]:
        assert isinstance(exporter, TraceExporter)
        return Path(exporter._file.name).read_text().splitlines()[1:]  # the first line has the time


def export(path: Path, *transcripts: Transcript) -> None:
    exporter = TraceExporter(TraceConfig(path=str(path)), CONTEXT)
    exporter.transcripts(transcripts)
    for transcript in transcripts:
        lengths = {"prompt_tokens": len(transcript.prompt), "output_tokens": len(transcript.output)}
        event = request_event(exporter._started_s + 1.0, "length", **lengths)
        exporter.export((msgspec.structs.replace(event, request_id=transcript.request_id),))
    exporter.close()


def transcript(name: str, own: int, output: int = 3, tenant: str = "") -> Transcript:
    rng = random.Random(name)
    return Transcript(name, [*SHARED, *rng.choices(range(70000), k=own)], rng.choices(range(70000), k=output), tenant)


def test_equal_beginnings_have_equal_hashes(tmp_path: Path) -> None:
    export(tmp_path / "t", transcript("a", 20), transcript("b", 20))
    a, b = read_trace(tmp_path / "t")
    assert (a.prompt_tokens, a.output_tokens, a.block_tokens) == (2 * SIZE + 20, 3, SIZE)
    assert a.block_hashes[:2] == b.block_hashes[:2] and a.block_hashes[2] != b.block_hashes[2]
    assert a.measured is not None and a.measured.e2e_ms > 0.0


def test_a_line_says_which_of_several_engines_served_the_request(tmp_path: Path) -> None:
    exporter = TraceExporter(TraceConfig(path=str(tmp_path / "t")), CONTEXT)
    for name, engine in (("a", "replica-1"), ("b", "default")):
        exporter.transcripts([transcript(name, 20)])
        event = request_event(exporter._started_s + 1.0, "length", prompt_tokens=52, output_tokens=3)
        exporter.export((msgspec.structs.replace(event, request_id=name, engine=engine),))
    exporter.close()
    _, *lines = map(json.loads, (tmp_path / "t").read_text().splitlines())
    assert [line.get("engine") for line in lines] == ["replica-1", None]
    assert len(list(read_trace(tmp_path / "t"))) == 2, "a simulation takes both"


def test_blocks_of_the_output_are_hashed_too(tmp_path: Path) -> None:
    export(tmp_path / "t", transcript("a", 0, output=2 * SIZE))
    (request,) = read_trace(tmp_path / "t")
    assert len(request.block_hashes) == 4


def test_tenants_share_nothing(tmp_path: Path) -> None:
    export(tmp_path / "t", transcript("a", 20), transcript("b", 20, tenant="other"))
    a, b = read_trace(tmp_path / "t")
    assert not {*a.block_hashes} & {*b.block_hashes}


def test_another_run_of_the_server_has_another_salt(tmp_path: Path) -> None:
    for _ in range(2):
        export(tmp_path / "t", transcript("a", 20))
    a, b = read_trace(tmp_path / "t")
    assert not {*a.block_hashes} & {*b.block_hashes}


def test_lines_hold_numbers_and_hashes_alone(tmp_path: Path) -> None:
    export(tmp_path / "t", transcript("a", 20))
    line = json.loads((tmp_path / "t").read_text().splitlines()[1])
    assert line.keys() == {"arrival_s", "prompt_tokens", "output_tokens", "block_hashes", "measured"}
    assert all(isinstance(value, int | float) for value in line["measured"].values())
    assert min(line["block_hashes"]) > 1 << 32


def test_a_sequence_without_output_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t"
    exporter = TraceExporter(TraceConfig(path=str(path)), CONTEXT)
    exporter.transcripts([Transcript("r1", SHARED, (), "")])
    exporter.export(one_of_each())
    exporter.close()
    assert len(path.read_text().splitlines()) == 1
