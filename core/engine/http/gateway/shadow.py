"""Whether a smaller model answers as the largest one does: some requests are sent to both, and the answers compared.

The client's answer is over by then. The largest model gets the request as the smaller one got it, on the same
terms, and only where one of its targets is idle: a client's request that arrives meanwhile ends it.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import msgspec
import structlog

from engine.contracts.config import ShadowSettings
from engine.contracts.events import OwnRequestEvent
from engine.contracts.router import ApiRequest
from engine.http.gateway.asked import Copy, Terms, body_for
from engine.http.gateway.own_requests import MOST_BYTES, NotAnswered, ask
from engine.http.gateway.state import GatewayState
from engine.http.gateway.usage import cost_of, usage_of
from engine.service.agreement import agree
from engine.service.targets import Target

MOST_BODY_BYTES = 64 * 1024
"""Requests with more are not compared: they are kept until their answer is over."""
TOOLS = (b'"tools"', b'"functions"')
"""No text in JSON has these bytes: its quotes are escaped."""
POLL_S = 0.02
"""How soon a shadow makes room."""

log = structlog.get_logger("engine.gateway")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


@dataclass(frozen=True, slots=True)
class Drawn:
    """A request whose answer is to be compared."""

    request_id: str
    data: bytes
    """Of its body."""
    terms: Terms
    tokens: int
    stream: bool
    copy: Copy


class Shadows:
    """Of one name. Use on the event loop's thread only."""

    def __init__(self, name: str, settings: ShadowSettings, models: list[str]) -> None:
        """``models``: that the name stands for; the last one is the largest."""
        self.name = name
        self.settings = settings
        self.largest = models[-1]
        self._random = random.Random()
        self._tasks: set[asyncio.Task[None]] = set()

    def draw(self, api: ApiRequest, data: bytes, terms: Terms) -> Drawn | None:
        """``None``: this one is not compared. ``data``: of its body."""
        is_compared = api.kind == "chat" and api.n == 1 and len(data) <= MOST_BODY_BYTES
        if not is_compared or any(name in data for name in TOOLS) or self._random.random() >= self.settings.share:
            return None
        return Drawn(api.request_id, data, terms, len(api.prompts[0]), api.stream, Copy(MOST_BYTES))

    def follow(self, state: GatewayState, drawn: Drawn, model: str) -> None:
        """Send it to the largest model, too, now that ``model`` has answered."""
        if model == self.largest:
            return
        target = self._idle(state) if len(self._tasks) < self.settings.most else None
        answer = None if drawn.copy.data is None else text_of(drawn.copy.data, streams=drawn.stream)
        if target is None or answer is None:
            self._report(state, drawn, model, "dropped")
            return
        task = asyncio.create_task(self._compare(state, drawn, model, answer, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _idle(self, state: GatewayState) -> Target | None:
        """A target that has nothing to do, or the provider that may be paid for."""
        if self.settings.provider is not None:
            target = state.targets[self.settings.provider]
            return target if target.takes_requests else None
        own = [target for target in state.targets.having(self.largest) if target.provider is None]
        return next((target for target in own if target.takes_requests and not target.load.sequences), None)

    async def _compare(self, state: GatewayState, drawn: Drawn, model: str, answer: str, target: Target) -> None:
        given = {**drawn.terms.fields, "stream": False, "stream_options": None}
        body = body_for(target, drawn.data, self.largest, given)
        assert state.session is not None
        limit_s = (target.provider or state.gateway).first_byte_s
        request_id = f"{drawn.request_id}-shadow"
        tokens, slo_class = drawn.tokens, drawn.terms.slo_class
        asked = ask(state.session, state.gateway, target, body, tokens, request_id, limit_s, slo_class)
        asking = asyncio.create_task(asked)
        result, cost = "failed", 0.0
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=POLL_S)
                if target.provider is None and target.load.sequences > 1:
                    asking.cancel()
            data = await asking
            cost, other = cost_of(usage_of(data), target.provider), text_of(data)
            if other is not None:
                result = "agrees" if agree(answer, other) else "differs"
        except NotAnswered as error:
            log.info("a shadow was not answered", target=target.id, why=str(error), request_id=drawn.request_id)
        except asyncio.CancelledError:
            asking.cancel()
            result = "dropped"
        self._report(state, drawn, model, result, target.id, cost)

    def _report(
        self, state: GatewayState, drawn: Drawn, model: str, result: str, server: str = "", cost: float = 0.0
    ) -> None:
        now_s = time.monotonic()
        event = OwnRequestEvent(now_s, drawn.request_id, "shadow", result, self.name, model, server, cost)
        state.bus.publish((event,))


def text_of(data: bytes, *, streams: bool = False) -> str | None:
    """Of a chat's answer with one choice; ``None``: it is none. ``streams``: its events."""
    events = (
        [line.removeprefix(b"data:") for line in data.splitlines() if line.startswith(b"data:")] if streams else [data]
    )
    try:
        answers = [msgspec.json.decode(one, type=_Answer) for one in events if one.strip() != b"[DONE]"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    choices = [choice for answer in answers for choice in answer.choices]
    parts = [choice.delta if streams else choice.message for choice in choices]
    return "".join([part.content or "" for part in parts if part is not None]) if choices else None
