"""The bodies of ``/v1/chat/completions``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.http.format import ChunkFormat
from engine.service.logprobs import chat_logprobs
from engine.service.output import Delta
from engine.service.parts import CallText, Reasoning
from engine.service.protocol import ChatOptions

ROLE = {"role": "assistant", "content": "", "refusal": None}


class ChatFormat(ChunkFormat):
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    finish = re.compile(rb'"finish_reason": ?"')

    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = []
        index, ids = delta.index, self.ids(delta)
        if first:
            chunks.append(self.chunk(_choice(index, ROLE)) | self.prompt_ids(index))
        for part in delta.parts:
            if isinstance(part, Reasoning):
                chunks.append(self.chunk(_choice(index, _reasoning(part.text)) | ids))
                ids = self.ids(Delta(index))
        text = delta.text
        if text or delta.tokens:
            chunks.append(self.chunk(_choice(index, {"content": text}, self._logprobs(delta)) | ids))
            ids = self.ids(Delta(index))
        for call in delta.calls:
            self._note(index, call)
            called = self._called([call]) or {"tool_calls": [_call_delta(call)]}
            chunks.append(self.chunk(_choice(index, called) | ids))
            ids = self.ids(Delta(index))
        if delta.finish_reason is not None:
            chunks.append(self.chunk(_choice(index, {}, finish_reason=self._reason(delta)) | ids))
        return chunks

    def choice(self, output: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if calls := output.calls:
            self._note(output.index, calls[-1])
            called = self._called(calls) or {"tool_calls": [_call(part) for part in calls]}
            message |= {"content": output.text or None} | called
        if output.thought:
            message |= _reasoning(output.thought)
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._reason(output),
            **self.ids(output),
        }

    def extras(self) -> dict[str, Any]:
        return self.prompt_ids(0)

    def _note(self, index: int, part: CallText) -> None:
        """Keep the arguments of a choice's last call."""
        if part.id:
            self._calling[index] = []
        self._calling[index].append(part.arguments)

    def _reason(self, delta: Delta) -> str | None:
        """An output that ends by itself after it has called tools, as it chose to, waits for what they say. A call
        that a stop string has cut is none to be run."""
        tools = self.job.tools
        called = delta.index in self._calling and tools is not None and not tools.is_named
        if not called or delta.finish_reason != "stop":
            return delta.finish_reason
        if delta.stop is not None and not _is_whole("".join(self._calling[delta.index])):
            return "stop"
        return "function_call" if self._is_older else "tool_calls"

    @property
    def _is_older(self) -> bool:
        """The request offered ``functions``."""
        options = self.job.options
        assert isinstance(options, ChatOptions)
        return bool(options.functions)

    def _called(self, calls: Sequence[CallText]) -> dict[str, Any]:
        """A part of the one call, or all of it, for those that know no other notation; empty: the request does."""
        if not self._is_older:
            return {}
        (call,) = calls
        return {"function_call": ({"name": call.name} if call.id else {}) | {"arguments": call.arguments}}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self.tokenizer.token_bytes) if self.wants_logprobs else None


def _reasoning(text: str) -> dict[str, str]:
    """By both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _is_whole(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _call(part: CallText) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


def _call_delta(part: CallText) -> dict[str, Any]:
    """The first part of a call has its id, type and name; the others have more of its arguments."""
    if part.id:
        return {"index": part.index, **_call(part)}
    return {"index": part.index, "function": {"arguments": part.arguments}}


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
