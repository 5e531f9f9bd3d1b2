"""The page at ``/ui/`` in a browser: what it shows, by keyboard, and that it asks nobody but its server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.contracts.events import Chunk, StepEvent
from engine.loop.messages import StepOutputs

from ..needs import needs_browser
from ..service.fakes import Script, in_loop, says
from .browser import Tab, chromium, opened
from .fakes import Running, running
from .routes.test_fleet import two
from .test_findings import offer

pytestmark = needs_browser
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
@pytest.mark.parametrize("name", ["constructor", "chat/%", "nowhere/%E0"])
async def test_odd_addresses_lead_to_the_chat(devtools: str, name: str) -> None:
    async with page(devtools) as (tab, _):
        await tab.js("location.hash = '#requests'")
        await tab.until("document.title.startsWith('Requests')")
        await tab.js(f"location.hash = '#{name}'")
        assert await tab.until("document.title.startsWith('Chat')")


@in_loop
async def test_a_command_finds_something_and_the_page_shows_it(devtools: str) -> None:
    async with page(devtools) as (tab, server):
        offer(server, "finds_waiting_rows")
        await tab.js("document.activeElement.blur()")
        await tab.press("5")
        await tab.until("document.querySelector('.findings button')")
        assert await tab.text(".findings button") == "Run look"
        await tab.js("document.querySelector('.findings button').focus()")
        await tab.press("Enter")
        assert "Rows wait." in await tab.until(
            "document.querySelector('.findings .card') && document.querySelector('.findings .card').textContent"
        )
        assert await tab.text(".findings > div:last-child > p") == "One window is not enough."
        assert await tab.text(".findings pre") == "scheduler.max_requests=16"
        assert await tab.text(".findings .facts dd") == "477 / 449 / 502"
        assert await tab.text(".findings .facts dd + dd") == "mean of the span"
        assert await tab.text(".findings pre + p") == "instead of scheduler.max_requests=2"
        assert "Predicts queue_ms of 0-95 instead of 476." in await tab.text(".findings .card")
        assert await tab.text(".findings [role=status]") == "look: 1 finding."


CHOICE = "document.querySelector('#engines select')"


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
        await tab.until("document.querySelectorAll('.requests tbody tr').length === 1")
        first = await tab.js("document.querySelector('.requests tbody tr').dataset.id")
        await tab.until(f"{CHOICE}.options[0].text === 'a: engine dead'")
        await tab.js(f"{CHOICE}.value = 'b'; {CHOICE}.dispatchEvent(new Event('change'))")
        await tab.until(
            f"![null, undefined, '{first}'].includes(document.querySelector('.requests tr[data-id]')?.dataset.id)"
        )
        assert await tab.js("document.querySelectorAll('.requests tbody tr').length") == 1
        await tab.js("document.querySelector('.requests tbody a').click()")
        await tab.until("document.querySelector('.figures')")
        assert "Engineb" in await tab.text(".figures")
        for number, path in ((3, "engine/latency"), (4, "engine/plan")):
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
        for number, name in ((2, "Requests"), (3, "Latency"), (4, "Plan")):
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
        for number, name in enumerate(("Chat", "Requests", "Latency", "Plan", "Findings"), 1):
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
async def test_twenty_thousand_samples_are_drawn(devtools: str) -> None:
    script = """(async () => {
      const { Samples, COLUMNS, MOST } = await import('/ui/samples.js');
      const { latencyScreen } = await import('/ui/latency.js');
      const samples = new Samples();
      for (let at = 0; at < MOST; at++)
        samples.add(1.7e9 + at, Object.fromEntries(COLUMNS.map((name, i) => [name, 50 + i + 40 * Math.sin(at / 70)])));
      const screen = latencyScreen(samples);
      document.getElementById('main').replaceChildren(screen.element);
      screen.element.querySelectorAll('input')[2].click();
      const took = [];
      for (let i = 0; i < 10; i++) {
        const begun = performance.now();
        screen.draw();
        await new Promise(requestAnimationFrame);
        took.push(performance.now() - begun);
      }
      const inked = [...document.querySelectorAll('canvas')].map((canvas) =>
        canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0));
      return { inked, points: samples.at.length, median: took.sort((a, b) => a - b)[5] };
    })()"""
    async with page(devtools) as (tab, _):
        found = await tab.js(script)
        assert found["points"] == 20_000 and found["inked"] == [True] * 5
        print(f"five plots of 20,000 samples, median frame: {found['median']:.1f} ms")
