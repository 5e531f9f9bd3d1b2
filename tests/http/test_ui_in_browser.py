"""The page at ``/ui/`` in a browser: what it shows, by keyboard, and that it asks nobody but its server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.contracts.config import SloClass, SloSettings
from engine.contracts.events import Chunk, FirstTokenEvent, StepEvent
from engine.loop.messages import StepOutputs
from engine.service.history import MOST_PERIODS, PERIOD_S, History

from ..needs import needs_browser
from ..service.fakes import Script, in_loop, says
from .browser import Tab, chromium, opened
from .fakes import Running, chat, running
from .routes.test_fleet import two
from .test_findings import offer

pytestmark = needs_browser
CHAT = "/v1/chat/completions"
HELLO = says("Hello world")
HOSTILE = '<img src=x onerror="alert(1)"> `a` <script>alert(2)</script>'


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    with chromium() as address:
        yield address


@asynccontextmanager
async def page(devtools: str, script: Script = HELLO, **server: Any) -> AsyncIterator[tuple[Tab, Running]]:
    """The page of a scripted engine. At the end, the browser has nothing to report and has asked no other host."""
    async with running(script, **server) as served, opened(devtools, f"{served.url}/ui/") as tab:
        yield tab, served
        assert tab.messages == []
        assert {url for url in tab.urls if not url.startswith((f"{served.url}/", "blob:"))} == set()
        assert len(tab.urls) > 10


async def ask(tab: Tab, text: str) -> None:
    await tab.press("/")
    await tab.until("document.activeElement.matches('textarea')")
    await tab.type(text)
    await tab.press("Enter")


@in_loop
async def test_an_answer_streams_shows_its_speed_and_leads_to_its_waterfall_by_keyboard(devtools: str) -> None:
    async with page(devtools) as (tab, server):
        server.client.hold_before = 6
        await ask(tab, "hi")
        assert await tab.until("document.querySelector('.turn.model .text').textContent === 'Hello '")
        live = await tab.until("document.querySelector('.live strong') && document.querySelector('.live').textContent")
        assert "tokens/s" in live and "TTFT" in live and "6 tokens" in live
        assert await tab.text(".composer button") == "Stop"
        server.client.proceeding.set()
        line = await tab.until("document.querySelector('.live a') && document.querySelector('.live').textContent")
        assert await tab.text(".turn.model .text") == "Hello world"
        assert "12 tokens" in line and "4 cached" in line
        await tab.js("document.querySelector('.log').focus()")
        await tab.press("Tab")
        await tab.press("Enter")
        await tab.until("document.querySelector('.drawing svg')")
        labels = await tab.js("[...document.querySelectorAll('.drawing .label')].map((each) => each.textContent)")
        assert labels[:7] == ["receive", "tokenize", "route", "dispatch", "queue", "prefill", "decode"]
        await tab.press("Escape")
        await tab.until("location.hash === '#requests' && document.querySelector('.requests tbody a')")


@in_loop
async def test_chunks_and_other_prompts_are_drawn_and_the_trace_can_be_saved(devtools: str) -> None:
    async with page(devtools) as (tab, server):
        client = server.client
        client.hold_before = 1
        await ask(tab, "hi")
        await tab.until("document.querySelector('.live strong')")
        name = client.requests[0].request_id
        chunks = (Chunk("chatcmpl-" + "0" * 26 + "abcdef-0", 90, 0), Chunk(name, 8, 4))
        event = StepEvent(time.monotonic(), 1, 1e4, 0.1, 1e4, 2, 98, 0, 2, 0, 0.5, gap_ms=0.2, chunks=chunks)
        client.deliver(StepOutputs((), (event,), client.stats))
        client.proceeding.set()
        await tab.until("document.querySelector('.live a')")
        await tab.js("document.querySelector('.live a').click()")
        await tab.until("document.querySelector('.drawing svg')")
        assert "abcdef" in await tab.text(".reasons")
        await tab.js(
            "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#'; }"
        )
        await tab.js("document.querySelector('.waterfall button').click()")
        assert "traceEvents" in await tab.until("window.saved")


@in_loop
async def test_what_a_model_writes_is_text(devtools: str) -> None:
    async with page(devtools, says(HOSTILE)) as (tab, _):
        await ask(tab, "hi")
        await tab.until("document.querySelector('.live a')")
        assert await tab.text(".turn.model .text") == HOSTILE.replace("`", "")
        assert await tab.js("document.querySelectorAll('.log img, .log script').length") == 0


@in_loop
async def test_escape_stops_an_answer(devtools: str) -> None:
    async with page(devtools) as (tab, server):
        server.client.hold_before = 3
        await ask(tab, "hi")
        await tab.until("document.querySelector('.turn.model .text').textContent === 'Hel'")
        await tab.press("Escape")
        await server.client.abort_seen.wait()
        assert "Stopped." in await tab.until("document.querySelector('.live .muted')?.textContent")
        assert await tab.text(".composer button") == "Send"


@in_loop
async def test_a_new_chat_begins_empty_while_an_answer_comes(devtools: str) -> None:
    async with page(devtools) as (tab, server):
        server.client.hold_before = 0
        await ask(tab, "hi")
        while not server.client.requests:
            await asyncio.sleep(0.01)
        await tab.js("[...document.querySelectorAll('button')].find((each) => each.textContent === 'New chat').click()")
        await server.client.abort_seen.wait()
        await tab.until("document.querySelector('.composer button').textContent === 'Send'")
        assert await tab.js("document.querySelector('.composer textarea').value") == ""


@in_loop
@pytest.mark.parametrize("name", ["constructor", "overview/%", "nowhere/%E0"])
async def test_odd_addresses_lead_to_the_overview(devtools: str, name: str) -> None:
    async with page(devtools) as (tab, _):
        await tab.js("location.hash = '#requests'")
        await tab.until("document.title.startsWith('Requests')")
        await tab.js(f"location.hash = '#{name}'")
        assert await tab.until("document.title.startsWith('Overview')")


@in_loop
async def test_a_command_finds_something_and_the_page_shows_it(devtools: str) -> None:
    async with page(devtools) as (tab, server):
        offer(server, "finds_waiting_rows")
        await tab.js("document.activeElement.blur()")
        await tab.press("3")
        await tab.until("document.querySelector('.findings button')")
        assert await tab.text(".findings button") == "Run look"
        await tab.js("document.querySelector('.findings button').click()")
        assert "Rows wait." in await tab.until(
            "document.querySelector('.findings .card') && document.querySelector('.findings .card').textContent"
        )
        assert await tab.text(".findings > div:last-child > p") == "One window is not enough."
        assert await tab.text(".findings pre") == "scheduler.max_requests=16"
        assert await tab.text(".findings .facts dd") == "477 / 449 / 502"
        assert await tab.text(".findings .facts dd + dd") == "mean of the span"
        assert await tab.text(".findings pre + p") == "instead of scheduler.max_requests=2"
        assert "Predicts queue_ms of 0-95 instead of 476." in await tab.text(".findings .card")
        assert (await tab.text(".findings [role=status]")).startswith("look: 1 finding, ")


@in_loop
async def test_the_overview_names_the_first_finding_and_when_it_was_seen(devtools: str) -> None:
    async with running(HELLO) as server:
        offer(server, "finds_waiting_rows")
        async with opened(devtools, f"{server.url}/ui/") as tab:
            await tab.until("document.querySelector('.finding a')")
            assert re.fullmatch(r"Rows wait\. look, [\d:]{8} to [\d:]{8}", await tab.text(".finding"))
            await tab.js("document.querySelector('.finding a').click()")
            assert "seen" in await tab.until("document.querySelector('.findings .card')?.textContent")
            offer(server, "finds_nothing")
            await tab.press("1")
            await tab.until("document.querySelector('.finding').textContent.startsWith('No finding look, ')")
            assert tab.messages == []


CHOICE = "document.querySelector('#engines select')"
CLASSES = "document.querySelector('.head select')"
ENDED = "[aria-label=Requests]"


@in_loop
async def test_of_several_engines_every_screen_shows_the_one_that_is_chosen(devtools: str) -> None:
    async with two() as (server, clients), opened(devtools, f"{server.url}/ui/") as tab:
        await tab.until("!document.getElementById('engines').hidden")
        assert await tab.js(f"[...{CHOICE}.options].map((each) => each.text)") == ["a", "b"]
        await ask(tab, "hi")
        await tab.until("document.querySelector('.live a')")
        clients["a"].die()
        await tab.js("document.activeElement.blur()")
        await tab.press("n")
        await ask(tab, "hi")
        await tab.until("document.querySelectorAll('.live a').length === 1")
        await tab.js("document.activeElement.blur()")
        await tab.press("2")
        await tab.until(f"document.querySelectorAll('{ENDED} tbody tr').length === 1")
        first = await tab.js(f"document.querySelector('{ENDED} tbody tr').dataset.id")
        await tab.until(f"{CHOICE}.options[0].text === 'a: engine dead'")
        await tab.js(f"{CHOICE}.value = 'b'; {CHOICE}.dispatchEvent(new Event('change'))")
        await tab.until(
            f"![null, undefined, '{first}'].includes(document.querySelector('{ENDED} tr[data-id]')?.dataset.id)"
        )
        assert await tab.js(f"document.querySelectorAll('{ENDED} tbody tr').length") == 1
        await tab.js(f"document.querySelector('{ENDED} tbody a').click()")
        await tab.until(f"document.querySelector('{ENDED} .figures')")
        assert "Engineb" in await tab.text(f"{ENDED} .figures")
        for number, path in ((1, "engine/latency"), (4, "engine/plan")):
            asked = len(tab.urls)
            await tab.press(str(number))
            while not any(f"{path}?engine=b" in url for url in tab.urls[asked:]):
                await asyncio.sleep(0.01)
        await tab.resize(400, 800)
        assert await tab.js("document.documentElement.scrollWidth") <= 400
        assert tab.messages == []


@in_loop
async def test_one_engine_leaves_nothing_to_choose(devtools: str) -> None:
    async with page(devtools) as (tab, _):
        await tab.until("document.getElementById('state').dataset.state === 'good'")
        while not any(url.endswith("engine/fleet") for url in tab.urls):
            await asyncio.sleep(0.01)
        await tab.js("document.activeElement.blur()")
        for number, name in ((2, "Requests"), (1, "Overview"), (4, "Plan")):
            await tab.press(str(number))
            await tab.until(f"document.querySelector('nav [aria-current]').textContent === '{name}'")
        await tab.until("document.querySelectorAll('.slots tr').length > 1")
        assert await tab.js("document.getElementById('engines').hidden")
        assert not any("engine=" in url for url in tab.urls)


@in_loop
async def test_every_screen_fits_a_narrow_window_and_opens_by_its_number(devtools: str) -> None:
    async with page(devtools) as (tab, _):
        await tab.js("document.activeElement.blur()")
        await tab.resize(400, 800)
        for number, name in enumerate(("Overview", "Requests", "Findings", "Plan", "Chat"), 1):
            await tab.press(str(number))
            await tab.until(f"document.querySelector('nav [aria-current]').textContent === '{name}'")
            assert (
                await tab.until("document.querySelector('main > section:not([hidden]) :is(h1, textarea)')") is not None
            )
            assert await tab.js("document.documentElement.scrollWidth") <= 400, name
        await tab.until("document.querySelectorAll('.slots tr').length > 1")
        await tab.press("t")
        await tab.press("t")
        assert await tab.js("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
        await tab.press("?")
        assert await tab.js("document.getElementById('shortcuts').open")
        await tab.press("Escape")
        await tab.until("!document.getElementById('shortcuts').open")


@in_loop
async def test_the_key_is_asked_for_and_stays_in_the_tab(devtools: str) -> None:
    async with running(api_key="sésame", ui=True) as server, opened(devtools, f"{server.url}/ui/") as tab:
        for key, said in (("wrong", ""), ("sésame", "That is not the key of this server.")):
            await tab.until(f"document.querySelector('#key[open] #key-problem')?.textContent === '{said}'")
            await tab.js("document.getElementById('key-value').focus()")
            await tab.type(key)
            await tab.press("Enter")
        await tab.until("document.getElementById('model').textContent === 'tiny'")
        assert await tab.js("sessionStorage.getItem('engine-key')") == "sésame"
        assert await tab.js("localStorage.length + document.cookie.length") == 0
        assert all("same" not in url for url in tab.urls)


@in_loop
async def test_the_page_opens_on_the_last_hour_its_targets_and_the_slowest_requests(devtools: str) -> None:
    chat_class = SloClass(ttft_ms=150.0, itl_ms=30.0)
    async with running(HELLO, slo=SloSettings({"chat": chat_class, "code": SloClass(ttft_ms=900.0)})) as server:
        for slo_class in ("chat", "chat", "code"):
            assert (await server.post(CHAT, chat(), f"X-SLO-Class: {slo_class}"))[0] == 200
        engine = server.server.state.engine
        hour = [FirstTokenEvent(at * PERIOD_S, "r", 50.0 + at % 70, slo_class="chat") for at in range(MOST_PERIODS)]
        engine.history = History(lambda: (MOST_PERIODS - 0.5) * PERIOD_S)
        engine.history.add(hour)
        async with opened(devtools, f"{server.url}/ui/") as tab:
            await tab.until("document.querySelectorAll('section:not([hidden]) .requests tbody tr').length === 3")
            assert await tab.js("document.title") == "Overview · engine"
            figures = await tab.text(".now")
            assert "Slowest TTFT" in figures and "Errors0" in figures
            await tab.js("document.querySelectorAll('.choice input')[2].click()")
            pixels = "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
            inked = f"[...document.querySelectorAll('canvas')].map((canvas) => {pixels}.some((value) => value > 0))"
            assert await tab.js(inked) == [True] * 7
            periods = "[...document.querySelectorAll('.now > p, .period, .plot.table .muted + span')]"
            periods = await tab.js(f"{periods}.map((each) => each.textContent)")
            assert periods == ["last 60 s", *["last 5 s"] * 7, "last 5 min"]
            await tab.until("document.querySelector('.head h2 span').textContent === 'last 60 min'")
            server.server.state.waterfalls.forgot_s = time.monotonic() - 600.0
            await tab.until("document.querySelector('.head h2 span').textContent.startsWith('last 10 min: the server')")
            await tab.js(f"{CLASSES}.value = 'chat'; {CLASSES}.dispatchEvent(new Event('change'))")
            await tab.until("document.querySelectorAll('section:not([hidden]) .requests tbody tr').length === 2")
            assert "target 150 ms" in await tab.text(".plot")
            asked = len(tab.urls)
            while not any("engine/history?since=" in url for url in tab.urls[asked:]):
                await asyncio.sleep(0.01)
            assert not any("since=0&" in url for url in tab.urls[asked:]), "what is known is not asked for again"
            assert tab.messages == []
