"""A file of requests without a listener: the same batches, with an engine of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from engine.contracts.command import FAILED, OK, USAGE
from engine.contracts.config import BatchSettings
from engine.http.batch_run import BatchRun
from engine.http.line_answers import LAST

from ..service.fakes import DirectRouter, Script, ScriptedClient, in_loop, make_plan, make_tokenizer
from .routes.test_batches import HELLO, halting, line


async def ran(folder: Path, script: Script = HELLO, until: int = 0) -> tuple[int, list[str], ScriptedClient]:
    """Exit code and what was said. ``until``: leave after so many lines, as if killed."""
    said, client = list[str](), ScriptedClient(script)
    plan = make_plan(batches=BatchSettings(path=str(folder / "out.batch"), quiet_s=0.0, max_in_flight=2))
    server = BatchRun(plan, {"default": client}, DirectRouter(), [], make_tokenizer(), say=said.append)
    server.file, server.output = folder / "in", folder / "out"
    await server.listen()
    work = asyncio.create_task(server.work())
    try:
        while not work.done() and not (until and len(client.requests) > until):
            await asyncio.sleep(0.01)
        return (work.result() if work.done() else -1), said, client
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await server.close()


@in_loop
async def test_the_same_line_goes_on_where_it_was_left_and_leaves_only_results(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"".join([*map(line, range(8)), line(8, temperature=9)]))
    code, _, client = await ran(tmp_path, halting(4), until=4)
    assert code == -1 and not (tmp_path / "out").exists()
    code, said, again = await ran(tmp_path)
    assert code == OK and said[-1].startswith("8 lines are answered in") and "1 failed" in said[-1]
    assert any("going on" in each for each in said) and len(again.requests) < 8
    found = [json.loads(each)["custom_id"] for each in (tmp_path / "out").read_text().splitlines()]
    (failed,) = (tmp_path / "out.errors").read_text().splitlines()
    assert found == [f"n{number}" for number in range(8)] and json.loads(failed)["custom_id"] == "n8"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out", "out.errors"]
    assert {request.priority for request in client.requests} == {LAST}


@in_loop
async def test_another_file_is_not_taken_for_the_rest_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(line(1) + line(2))
    await ran(tmp_path, halting(0), until=1)
    (tmp_path / "in").write_bytes(line(1) + line(3))
    code, said, _ = await ran(tmp_path)
    assert code == USAGE and any("a batch of another file" in each for each in said)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [(b"", USAGE, "endpoint is ''"), (line(1) + line(1), FAILED, "in:2: The custom_id 'n1' is that of line 1")],
)
@in_loop
async def test_a_file_with_mistakes_is_refused_with_its_line(
    tmp_path: Path, data: bytes, code: int, words: str
) -> None:
    (tmp_path / "in").write_bytes(data)
    found, said, _ = await ran(tmp_path)
    assert found == code and any(words in each for each in said) and not (tmp_path / "out").exists()
