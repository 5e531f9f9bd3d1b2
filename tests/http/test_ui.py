"""The page at ``/ui/`` as the server hands it out; what it does in a browser is in ``test_ui_in_browser.py``."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from engine.contracts.events import Chunk, StepEvent
from engine.http.routes.ui import FOLDER, POLICY, read_files
from engine.loop.messages import StepOutputs

from ..service.fakes import in_loop
from .fakes import chat, events_of, running

ROOT = Path(__file__).parents[2]
VENDORED = {
    "uplot/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot/LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""uPlot 1.6.32, byte for byte."""
FILES = read_files()
OURS = sorted(set(FILES) - set(VENDORED))


@in_loop
async def test_every_file_is_served_under_a_strict_policy() -> None:
    async with running() as server:
        for name in ("", *FILES):
            status, headers, body = await server.get(f"/ui/{name}", "Accept-Encoding: identity")
            assert status == 200 and body == FILES[name or "index.html"].body, name
            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-cache"
        assert "'unsafe" not in POLICY and "http" not in POLICY and "default-src 'none'" in POLICY


@in_loop
async def test_a_file_that_a_browser_has_is_not_sent_again() -> None:
    async with running() as server:
        _, headers, _ = await server.get("/ui/app.js")
        status, again, body = await server.get("/ui/app.js", f"If-None-Match: {headers['etag']}")
        assert (status, body, again["etag"]) == (304, b"", headers["etag"])
        assert (await server.get("/ui/app.js", 'If-None-Match: W/"other"'))[0] == 200


@in_loop
async def test_the_page_is_found_without_its_slash_and_nothing_beside_it_is() -> None:
    async with running() as server:
        status, headers, _ = await server.get("/ui")
        assert (status, headers["location"]) == (308, "ui/")
        for path in ("/ui/none.js", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/uplot/LICENSE", "/ui/uplot"):
            assert (await server.get(path))[0] == 404, path


@pytest.mark.parametrize(("ui", "without_key", "with_key"), [(None, 401, 200), (True, 200, 200), (False, 401, 404)])
@in_loop
async def test_with_a_key_the_page_is_after_it_unless_asked_for(
    ui: bool | None, without_key: int, with_key: int
) -> None:
    async with running(api_key="hush", ui=ui) as server:
        for path in ("/ui/", "/ui/app.js", "/ui/uplot/uPlot.min.css"):
            assert (await server.get(path))[0] == without_key
            assert (await server.get(path, "Authorization: Bearer hush"))[0] == with_key
        for path in ("/engine/plan", "/engine/requests", "/metrics", "/ui/none.js")[: 3 if ui else 4]:
            assert (await server.get(path))[0] == 401, "what has data stays behind the key"


def test_vendored_files_are_what_was_published() -> None:
    found = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in VENDORED}
    assert found == VENDORED


def test_the_page_is_small_and_names_no_other_host() -> None:
    assert sum(len(file.body) for file in FILES.values()) < 150_000
    for name in OURS:
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", FILES[name].body.decode())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name


def test_nothing_is_markup_that_a_script_wrote_or_code_that_markup_holds() -> None:
    page = FILES["index.html"].body.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", page)
    for name in OURS:
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function",
                                 FILES[name].body.decode()), name  # fmt: skip


def test_every_file_that_one_names_is_there() -> None:
    for name in OURS:
        text = FILES[name].body.decode()
        named = re.findall(r'from "\./([^"]+)"', text) + re.findall(r'(?:src|href)="([^"#]+)"', text)
        assert set(named) <= set(FILES), name


def test_the_files_go_into_the_wheel() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert any(FOLDER.is_relative_to(ROOT / included) for included in wheel["only-include"])
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split() if line]
    paths = [path.relative_to(ROOT) for path in FOLDER.rglob("*")]
    assert not [path for path in paths for part in path.parts if any(fnmatch.fnmatch(part, x) for x in ignored)]


def step(*chunks: Chunk) -> StepEvent:
    return StepEvent(0.0, 1, 1.0, 0.1, 0.9, 1, 64, 0, 1, 0, 0.0, chunks=chunks)


@in_loop
async def test_a_stream_shows_how_far_its_prompt_is_to_who_asks() -> None:
    async with running() as server:
        client = server.client
        client.hold_before = 0
        asked = asyncio.create_task(server.post("/v1/chat/completions", chat(stream=True, return_progress=True)))
        while not client.requests:
            await asyncio.sleep(0)
        silent = asyncio.create_task(server.post("/v1/chat/completions", chat(stream=True)))
        while len(client.requests) < 2:
            await asyncio.sleep(0)
        first, other = (request.request_id for request in client.requests)
        total = len(client.requests[0].prompt)
        computed = [Chunk(first, 4, 2), Chunk(first, 2, 6), Chunk(first, total - 8, 8)]
        for chunk in computed:
            client.deliver(StepOutputs((), (step(Chunk(other, 4, 0), chunk),), client.stats))
            await asyncio.sleep(0)
        client.proceeding.set()
        shown = [event["prompt_progress"] for event in events_of((await asked)[2]) if "prompt_progress" in event]
        assert [(each["cache"], each["processed"], each["total"]) for each in shown] == [(2, 6, total), (2, 8, total)]
        assert b"prompt_progress" not in (await silent)[2]
