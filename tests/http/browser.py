"""A headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from tests.needs import browser

WAIT_S = 20.0
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39}
"""Their Windows virtual key codes."""
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--disable-component-update")
FAULTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
"""Violations of the content security policy are log entries."""


@contextmanager
def chromium() -> Iterator[str]:
    """Where its DevTools listen, as ``127.0.0.1:port``."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser(), *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            assert process.stderr is not None
            try:
                line = next(line for line in process.stderr if "DevTools listening on" in line)
                yield line.split("//")[1].split("/")[0]
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # the command may be a script that starts it


class Tab:
    """A page with a profile of its own. ``messages``: what it wrote to the console, and what the browser reported."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self.messages: list[dict[str, Any]] = []
        self.urls: list[str] = []
        """Of all requests that it made."""

    async def listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._replies.pop(data["id"]).set_result(data)
            elif data["method"] in FAULTS:
                self.messages.append(data["params"])
            elif data["method"] == "Network.requestWillBeSent":
                self.urls.append(data["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        reply = self._replies[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            found = await reply
        assert "error" not in found, found["error"]
        result: dict[str, Any] = found["result"]
        return result

    async def js(self, expression: str) -> Any:
        """Its value, awaited."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Its first value that is true, tried at every frame."""
        turn = (
            f"const turn = () => {{ const found = {expression}; found ? done(found) : requestAnimationFrame(turn); }};"
        )
        try:
            return await self.js(f"new Promise((done) => {{ {turn} turn(); }})")
        except TimeoutError:
            shown = await self.js("document.body.innerText")
            raise AssertionError(f"never true: {expression}; the page shows: {shown}") from None

    async def text(self, selector: str) -> str:
        return str(await self.js(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        code = KEYS.get(key) or ord(key.upper())
        shared = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


@asynccontextmanager
async def opened(devtools: str, url: str) -> AsyncIterator[Tab]:
    """A tab in which ``url`` was loaded."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://{devtools}/json/new?about:blank") as response:
            target = (await response.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(target, max_msg_size=0) as socket:
            tab = Tab(socket)
            listening = asyncio.create_task(tab.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            await tab.resize(1280, 800)
            await tab.call("Page.navigate", url=url)
            await tab.until("document.readyState === 'complete'")
            yield tab
            await tab.call("Page.close")
            listening.cancel()
