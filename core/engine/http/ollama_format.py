"""The answers of Ollama's ``/api/chat`` and ``/api/generate``: JSON objects, in a stream one to a line.

https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import datetime
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine.http.blocks import BlockFormat, Event
from engine.http.sse import LINES
from engine.service.errors import ApiError
from engine.service.ollama_request import OllamaOptions
from engine.service.output import Delta
from engine.service.partial_json import members
from engine.service.parts import CallText, Part, Reasoning, Text
from engine.service.protocol import GenerationRequest


def ollama_error(error: ApiError) -> bytes:
    """``{"error": MESSAGE}`` as UTF-8 JSON."""
    return msgspec.json.encode({"error": error.message})


class OllamaFormat(BlockFormat):
    """What both share."""

    stream_type = LINES
    gap = b"\n"
    whole_stream = re.compile(rb'"done": ?true|\n\{\s*"error"\s*:\s*[{"]')

    @classmethod
    def at_once(cls, model: str, options: GenerationRequest) -> bytes | None:
        assert isinstance(options, OllamaOptions)
        if not options.done_reason:
            return None
        fields = _object(model, datetime.datetime.now(datetime.UTC), cls.said())
        return msgspec.json.encode(fields | {"done": True, "done_reason": options.done_reason})

    @staticmethod
    @abstractmethod
    def said(text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The fields of an object that has these."""

    def whole(self, outputs: Sequence[Delta]) -> bytes:
        (output,) = outputs
        said = self.said(output.text, output.thought, [*map(_call, output.calls)])
        return msgspec.json.encode(self._object(said) | self._ending(output))

    def begun(self) -> Iterator[Event]:
        yield from ()

    def opened(self, index: int, part: Part) -> Iterator[Event]:
        yield from ()

    def grown(self, index: int, part: Part, delta: Delta) -> Iterator[Event]:
        if isinstance(part, Text):
            yield self._object(self.said(part.text))
        elif isinstance(part, Reasoning):
            yield self._object(self.said(thought=part.text))

    def closed(self, index: int, block: Part, is_whole: bool) -> Iterator[Event]:
        if isinstance(block, CallText):  # whose arguments are an object there
            yield self._object(self.said(calls=[_call(block)]))

    def ended(self, delta: Delta) -> Iterator[Event]:
        yield self._object(self.said()) | self._ending(delta)

    def written(self, event: Event) -> bytes:
        return msgspec.json.encode(event) + b"\n"

    @staticmethod
    def broken(error: ApiError) -> bytes:
        return ollama_error(error) + b"\n"

    def _object(self, fields: dict[str, Any]) -> dict[str, Any]:
        created = datetime.datetime.fromtimestamp(self.job.created, datetime.UTC)
        return _object(self.job.api.model, created, fields)

    def _ending(self, output: Delta) -> dict[str, Any]:
        """Durations are nanoseconds."""
        usage, timings = self.generation.usage(), self.timings()
        return {
            "done": True,
            "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": round(timings["total_ms"] * 1e6),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(timings["prefill_ms"] * 1e6),
            "eval_count": usage.output_tokens,
            "eval_duration": round(timings["decode_ms"] * 1e6),
        }


class OllamaChatFormat(OllamaFormat):
    """Objects with a ``message``."""

    @staticmethod
    def said(text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
        return {"message": message}


class OllamaGenerateFormat(OllamaFormat):
    """Objects with a ``response``."""

    @staticmethod
    def said(text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thought} if thought else {})


def _object(model: str, created: datetime.datetime, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "created_at": created.isoformat(), **fields, "done": False}


def _call(part: CallText) -> dict[str, Any]:
    return {"function": {"name": part.name, "arguments": members(part.arguments)}}
