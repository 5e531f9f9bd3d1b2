"""A stored answer, served as if an engine generated it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from engine.contracts.request import Timings, TokensOut


class ReplayStream:
    """An :class:`engine.loop.client.OutputStream` of one output."""

    def __init__(self, output: TokensOut) -> None:
        self._outputs = iter((output,))

    def __aiter__(self) -> AsyncIterator[TokensOut]:
        return self

    async def __anext__(self) -> TokensOut:
        for output in self._outputs:
            return output
        raise StopAsyncIteration

    def abort(self, reason: str = "abort") -> None:
        """Nothing runs."""


def replayed(request_id: str, choice: Mapping[str, Any]) -> ReplayStream:
    """``choice``: as made by :meth:`engine.serving.generation.SequenceRun.record`."""
    return ReplayStream(
        TokensOut(
            request_id,
            tokens=tuple(choice["tokens"]),
            logprobs=tuple(choice.get("logprobs", ())),
            prompt_logprobs=tuple(choice.get("prompt_logprobs", ())),
            finish_reason=choice["finish_reason"],
            stop_token=choice.get("stop_token"),
            timings=Timings(),
        )
    )
