"""The answers of ``/v1/messages``: https://docs.anthropic.com/en/api/messages and, for streams, messages-streaming."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine.http.blocks import BlockFormat, Event
from engine.http.errors import status_of
from engine.http.sse import event
from engine.service.cache_words import SECONDS
from engine.service.errors import ApiError
from engine.service.output import Delta
from engine.service.partial_json import members
from engine.service.parts import CallText, Part, Reasoning

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: ApiError) -> bytes:
    """``{"type": "error", "error": {"type", "message"}}`` as UTF-8 JSON."""
    status = status_of(error)
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


class MessagesFormat(BlockFormat):
    """Writes ``message`` objects."""

    whole_stream = re.compile(rb"\nevent: ?(?:message_stop|error)")

    def whole(self, outputs: Sequence[Delta]) -> bytes:
        (output,) = outputs
        content = [self._block(part) for part in output.parts]
        return msgspec.json.encode(
            self._message(content, self._ending(output, output.parts), self._usage()) | {"timings": self.timings()}
        )

    def begun(self) -> Iterator[Event]:
        usage = self._usage() | {"output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._message([], ending, usage)}

    def opened(self, index: int, part: Part) -> Iterator[Event]:
        block = self._block(part)
        if isinstance(part, CallText):
            block["input"] = {}
        else:
            block |= {name: "" for name in block if name != "type"}
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def grown(self, index: int, part: Part, delta: Delta) -> Iterator[Event]:
        if not isinstance(part, CallText):
            more = {"type": f"{_name(part)}_delta", _name(part): part.text}
        elif part.arguments:
            more = {"type": "input_json_delta", "partial_json": part.arguments}
        else:
            return
        yield {"type": "content_block_delta", "index": index, "delta": more}

    def closed(self, index: int, block: Part, is_whole: bool) -> Iterator[Event]:
        if isinstance(block, Reasoning):
            signed = {"type": "signature_delta", "signature": self._signature}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}

    def ended(self, delta: Delta) -> Iterator[Event]:
        ending, usage = self._ending(delta, self.blocks), self._usage()
        yield {"type": "message_delta", "delta": ending, "usage": usage, "timings": self.timings()}
        yield {"type": "message_stop"}

    @staticmethod
    def broken(error: ApiError) -> bytes:
        return event(messages_error(error), "error")

    def _message(self, content: list[Any], ending: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        job = self.job
        about = {"id": job.api.request_id, "type": "message", "role": "assistant", "model": job.api.model}
        return about | {"content": content} | ending | {"usage": usage}

    def _ending(self, delta: Delta, parts: Sequence[Part]) -> dict[str, Any]:
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif delta.stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if any(isinstance(part, CallText) for part in parts) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": delta.stop}

    def _block(self, part: Part) -> dict[str, Any]:
        if isinstance(part, CallText):
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": members(part.arguments)}
        block = {"type": _name(part), _name(part): part.text}
        return block | ({"signature": self._signature} if isinstance(part, Reasoning) else {})

    @property
    def _signature(self) -> str:
        """Clients send thoughts back with theirs; nothing here depends on it."""
        return self.job.api.request_id

    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompt that came from the prefix cache are counted apart, and so are others before its last
        breakpoint."""
        usage = self.generation.usage()
        hour = usage.written.get(SECONDS["1h"], 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.written_tokens,
            "cache_creation_input_tokens": usage.written_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation": {
                "ephemeral_5m_input_tokens": usage.written_tokens - hour,
                "ephemeral_1h_input_tokens": hour,
            },
            "output_tokens": usage.output_tokens,
        }


def _name(part: Part) -> str:
    return "thinking" if isinstance(part, Reasoning) else "text"
