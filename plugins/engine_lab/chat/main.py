"""Entry of ``engine chat``: finds or starts an engine, then asks until somebody leaves."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import replace
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench.probe import ProbeError, find_model
from engine_lab.bench.target import Target
from engine_lab.chat.ask import Answer, AskError, ask, clock
from engine_lab.chat.commands import obey
from engine_lab.chat.conversation import Conversation
from engine_lab.chat.own_server import StartError
from engine_lab.chat.prompt import read_message
from engine_lab.chat.screen import Screen, plain
from engine_lab.chat.summary import speed_so_far, summary
from engine_lab.chat.which import listens, started, words
from engine_lab.chat.why import waterfall
from engine_lab.shared.live import LiveEngine, LiveError

DEFAULT_URL = "http://127.0.0.1:8000"
REFRESH_S = 0.1


def run(flags: Any, overrides: list[str]) -> int:
    """Returns the exit status."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    own = bool(overrides or flags.model or flags.config_dir)
    if flags.url and own:
        console.print("engine chat: --url is a running engine; --model and overrides are for one of its own")
        return USAGE
    conversation = Conversation(flags.system)
    try:
        conversation.set_params(flags.params)
    except ValueError as error:
        console.print(Text(f"engine chat: --params: {error}"))
        return USAGE
    question = None if sys.stdin.isatty() and sys.stdout.isatty() else sys.stdin.read().strip()
    if question == "":
        console.print("engine chat: nothing on stdin; expected a question, or a terminal")
        return USAGE
    with asyncio.Runner() as runner:
        try:
            with contextlib.ExitStack() as stack:
                url = flags.url or DEFAULT_URL
                if own or not (flags.url or listens(url)):
                    url = stack.enter_context(started(words(flags, overrides), console))
                chat = Chat(runner, url, flags.api_key, conversation)
                stack.callback(chat.close)
                return chat.answer_once(question) if question else chat.talk()
        except (ProbeError, AskError) as error:
            hint = "" if flags.url or own else "; --url names another engine, --model or an override starts one"
            console.print(Text(f"engine chat: {error}{hint}"))
            return FAILED
        except StartError as error:
            console.print(Text(f"engine chat: {error}"))
            return error.status or FAILED


class Chat:
    """A conversation with the engine at ``url``. Raises :class:`ProbeError` if none answers."""

    def __init__(self, runner: asyncio.Runner, url: str, api_key: str | None, conversation: Conversation) -> None:
        self._runner = runner
        self._console = Console(highlight=False)
        self._session = runner.run(_open())
        url = url.rstrip("/").removesuffix("/v1")
        self._engine = LiveEngine(self._session, url, api_key)
        self._target = Target(url, "", "chat", api_key)
        try:
            self._target = replace(self._target, model=runner.run(find_model(self._session, url, api_key)))
        except BaseException:
            self.close()
            raise
        self._conversation = conversation
        self._last: Answer | None = None

    def close(self) -> None:
        self._runner.run(self._session.close())

    def answer_once(self, question: str) -> int:
        """Prints the answer alone."""
        answer = Answer(clock())
        written = 0

        def show() -> None:
            nonlocal written
            text = answer.text
            new = text[written:]
            print(plain(new) if sys.stdout.isatty() else new, end="", flush=True)
            written = len(text)

        self._runner.run(ask(self._session, self._target, self._body(question), answer, show))
        print()
        return OK

    def talk(self) -> int:
        """Until Ctrl-C, Ctrl-D or /exit."""
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # several lines are one message
        print(f"{self._target.model} at {self._target.base_url}; /help lists commands, Ctrl-D leaves")
        while True:
            try:
                line = read_message("> ")
            except EOFError:
                print()
                return OK
            except KeyboardInterrupt:
                print()
                if readline.get_line_buffer():
                    continue
                return INTERRUPTED
            if not line.strip():
                continue
            try:
                if not line.startswith("/"):
                    self._answer(line.strip())
                elif not obey(line.strip(), self._conversation, self._why, print):
                    return OK
            except (AskError, LiveError, ValueError) as error:
                self._console.print(Text(str(error), style="red"))

    def _body(self, question: str) -> dict[str, Any]:
        return self._conversation.body(self._target.model, question)

    def _answer(self, question: str) -> None:
        """Streams it. What Ctrl-C cut short is kept as far as it came; after an error the conversation is what it was
        before."""
        answer = self._last = Answer(clock())
        screen = Screen(sys.stdout, self._console.width)
        try:
            self._runner.run(_show_answer(self._session, self._target, self._body(question), answer, screen))
        except KeyboardInterrupt:
            self._runner.run(asyncio.sleep(REFRESH_S))  # the connection is closed meanwhile
        finally:
            screen.end()
        if answer.text:
            self._conversation.keep(question, answer.text)
        self._console.print(Text(f"{summary(answer, self._console.width - 1)}\n", style="dim"))

    def _why(self) -> None:
        if self._last is None or not self._last.said.response_id:
            raise ValueError("/why: no answer yet")
        found = self._runner.run(self._engine.json(f"/engine/requests/{self._last.said.response_id}"))
        for sequence in found["sequences"]:
            self._console.print(waterfall(sequence, self._console.width), "")


async def _open() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))


async def _show_answer(
    session: aiohttp.ClientSession, target: Target, body: dict[str, Any], answer: Answer, screen: Screen
) -> None:
    """Asks, and shows text and speed, also while nothing comes."""
    written = 0

    def show() -> None:
        nonlocal written
        text = answer.text
        screen.write(text[written:], speed_so_far(answer, clock()))
        written = len(text)

    async def refresh() -> None:
        while True:
            show()
            await asyncio.sleep(REFRESH_S)

    refreshing = asyncio.create_task(refresh())
    try:
        await ask(session, target, body, answer, show)
    finally:
        refreshing.cancel()
