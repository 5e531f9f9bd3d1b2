"""The answers of ``/v1/responses``: https://platform.openai.com/docs/api-reference/responses, and its streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine.http.blocks import BlockFormat, Event
from engine.http.sse import event
from engine.service.errors import ApiError
from engine.service.generation import Generation
from engine.service.job import Job
from engine.service.logprobs import chat_logprobs
from engine.service.output import Delta, ShownToken
from engine.service.parts import CallText, Part, Reasoning, Text
from engine.service.response_store import Record, response_id
from engine.service.responses_request import ResponsesOptions
from engine.service.tokenizer import Tokenizer


class ResponsesFormat(BlockFormat):
    """Writes ``response`` objects. Items have the ids of the response, with their place behind."""

    whole_stream = re.compile(rb"\nevent: ?(?:response\.(?:completed|failed|incomplete)|error)")

    def __init__(self, job: Job, tokenizer: Tokenizer, generation: Generation) -> None:
        super().__init__(job, tokenizer, generation)
        self._name = response_id(job.api.request_id)
        self._final: dict[str, Any] | None = None
        """The response once it has ended."""
        self._items: list[dict[str, Any]] = []
        """Those that are whole."""
        self._number = 0
        """Of the next event."""
        self._shown: dict[int | None, list[ShownToken]] = {}
        """Tokens of each text, by its number."""
        self._sent = 0
        """Of those of the open text."""
        self._num_texts = 0

    def whole(self, outputs: Sequence[Delta]) -> bytes:
        (output,) = outputs
        items: list[dict[str, Any]] = []
        self._take(output.tokens)
        for index, part in enumerate(output.parts):
            is_cut = index == len(output.parts) - 1 and output.finish_reason == "length"
            items.append(self._item(index, part, "incomplete" if is_cut else "completed", self._tokens()))
            self._num_texts += isinstance(part, Text)
        return msgspec.json.encode(self._ended_response(output, items))

    def events(self, delta: Delta) -> bytes:
        self._take(delta.tokens)
        return super().events(delta)

    def _take(self, tokens: Sequence[ShownToken]) -> None:
        for token in tokens:
            self._shown.setdefault(token.run, []).append(token)

    def _tokens(self) -> list[ShownToken]:
        """Those of the open text, or of the next one."""
        return self._shown.get(self._num_texts, [])

    def begun(self) -> Iterator[Event]:
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def opened(self, index: int, part: Part) -> Iterator[Event]:
        item = self._item(index, part, "in_progress", ())
        item["arguments" if isinstance(part, CallText) else "content"] = "" if isinstance(part, CallText) else []
        yield self._event("response.output_item.added", output_index=index, item=item)
        if not isinstance(part, CallText):
            yield self._event("response.content_part.added", **self._at(index, part), part=_content(part, "", []))

    def grown(self, index: int, part: Part, delta: Delta) -> Iterator[Event]:
        at = self._at(index, part)
        if isinstance(part, CallText):
            if part.arguments:
                yield self._event("response.function_call_arguments.delta", **at, delta=part.arguments)
        elif isinstance(part, Reasoning):
            yield self._event("response.reasoning_text.delta", **at, delta=part.text)
        else:
            logprobs = self._logprobs(self._tokens()[self._sent :])
            self._sent = len(self._tokens())
            yield self._event("response.output_text.delta", **at, delta=part.text, logprobs=logprobs)

    def closed(self, index: int, block: Part, is_whole: bool) -> Iterator[Event]:
        at = self._at(index, block)
        if isinstance(block, CallText):
            done = {"name": block.name, "arguments": block.arguments}
            yield self._event("response.function_call_arguments.done", **at, **done)
        else:
            logprobs = self._logprobs(self._tokens())
            if isinstance(block, Reasoning):
                yield self._event("response.reasoning_text.done", **at, text=block.text)
            else:
                yield self._event("response.output_text.done", **at, text=block.text, logprobs=logprobs)
            part = _content(block, block.text, logprobs)
            yield self._event("response.content_part.done", **at, part=part)
        item = self._item(index, block, "completed" if is_whole else "incomplete", self._tokens())
        self._items.append(item)
        if isinstance(block, Text):
            self._num_texts, self._sent = self._num_texts + 1, 0
        yield self._event("response.output_item.done", output_index=index, item=item)

    def ended(self, delta: Delta) -> Iterator[Event]:
        response = self._ended_response(delta, self._items)
        yield self._event(f"response.{response['status']}", response=response)

    def record(self) -> Record | None:
        if self._final is None:
            return None
        outputs = [msgspec.json.encode(_without_logprobs(item)) for item in self._final["output"]]
        return Record(self._name, msgspec.json.encode(self._final), b",".join(outputs))

    @staticmethod
    def broken(error: ApiError) -> bytes:
        what = {"code": error.code or "server_error", "message": error.message, "param": error.param}
        return event(msgspec.json.encode({"type": "error", **what}), "error")

    def failure(self, error: ApiError) -> bytes:
        what = {"code": error.code or "server_error", "message": error.message}
        response = self._response("failed", self._items) | {"error": what}
        name = "response.failed"
        return event(msgspec.json.encode(self._event(name, response=response)), name)

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}

    def _at(self, index: int, part: Part) -> dict[str, Any]:
        """Where a block is: which item, and which part of its content, the first and only one."""
        where: dict[str, Any] = {"item_id": self._id(index, part), "output_index": index}
        return where if isinstance(part, CallText) else where | {"content_index": 0}

    def _id(self, index: int, part: Part) -> str:
        prefix = "fc" if isinstance(part, CallText) else "rs" if isinstance(part, Reasoning) else "msg"
        return f"{prefix}_{self._name.partition('_')[2]}_{index}"

    def _item(self, index: int, part: Part, status: str, shown: Sequence[ShownToken]) -> dict[str, Any]:
        about = {"id": self._id(index, part), "status": status}
        if isinstance(part, CallText):
            call = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.arguments}
            return about | call
        if isinstance(part, Reasoning):
            return about | {"type": "reasoning", "summary": [], "content": [_content(part, part.text, [])]}
        content = [_content(part, part.text, self._logprobs(shown))]
        return about | {"type": "message", "role": "assistant", "content": content}

    def _logprobs(self, shown: Sequence[ShownToken]) -> list[dict[str, Any]]:
        if self.job.api.sampling.logprobs is None:
            return []
        return list(chat_logprobs(shown, self.tokenizer.token_bytes)["content"])

    def _ended_response(self, output: Delta, items: list[dict[str, Any]]) -> dict[str, Any]:
        usage = self.generation.usage()
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.written_tokens,
            },
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }
        found = {"usage": counts, "timings": self.timings()}
        if output.finish_reason == "length":
            why = {"incomplete_details": {"reason": "max_output_tokens"}}
            self._final = self._response("incomplete", items) | why | found
        else:
            self._final = self._response("completed", items) | found
        return self._final

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        assert isinstance(job.options, ResponsesOptions)
        return {
            "id": self._name,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": job.api.model,
            "output": items,
            "previous_response_id": job.options.previous_response_id,
            "service_tier": "default",
            "store": job.options.store,
            "truncation": "disabled",
            "usage": None,
            "user": job.options.user,
            **job.options.echoed,
        }


def _content(part: Part, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}
