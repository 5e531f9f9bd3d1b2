"""A stored answer, served as if an engine generated it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, get_args

from engine.contracts.request import FinishReason, Timings, TokenLogprobs, TokensOut
from engine.plugin_guard.calls import quote
from engine.plugin_guard.values import problems
from engine.service.engines import EngineHandle


class ReplayStream:
    """An :class:`engine.service.generation.Served` of one output, which counts as served by ``engine``."""

    def __init__(self, output: TokensOut, engine: EngineHandle) -> None:
        self._outputs = iter((output,))
        self.engine = engine
        self.sent_s = time.monotonic()
        self.predicted_s: float | None = None
        self.route: Mapping[str, str | int] = {}

    def __aiter__(self) -> AsyncIterator[TokensOut]:
        return self

    async def __anext__(self) -> TokensOut:
        for output in self._outputs:
            return output
        raise StopAsyncIteration

    def abort(self, reason: str = "abort") -> None:
        """Does nothing: no engine runs for a stored answer."""


def choice_problem(choice: Mapping[str, Any]) -> str:
    """Why this cannot be replayed; empty if it can."""
    reasons, tokens = get_args(FinishReason), choice.get("tokens")
    if not isinstance(tokens, tuple | list) or not all(type(token) is int and token >= 0 for token in tokens):
        return f"returned an answer whose tokens are a {type(tokens).__name__}, expected a tuple of token ids"
    if choice.get("finish_reason") not in reasons:
        found = quote(choice.get("finish_reason"))
        return f"returned an answer with finish_reason={found}, expected one of {', '.join(reasons)}"
    for name in ("logprobs", "prompt_logprobs"):
        if any(next(problems(entry, TokenLogprobs | None, name), "") for entry in choice.get(name) or ()):
            return f"returned an answer whose {name} are not TokenLogprobs"
    return ""


def replayed(request_id: str, choice: Mapping[str, Any], engine: EngineHandle) -> ReplayStream:
    """``choice``: as made by :meth:`engine.service.generation.SequenceRun.record`."""
    return ReplayStream(
        TokensOut(
            request_id,
            tokens=tuple(choice["tokens"]),
            logprobs=tuple(choice.get("logprobs") or ()),
            prompt_logprobs=tuple(choice.get("prompt_logprobs") or ()),
            finish_reason=choice["finish_reason"],
            stop_token=choice.get("stop_token"),
            timings=Timings(),
        ),
        engine,
    )
