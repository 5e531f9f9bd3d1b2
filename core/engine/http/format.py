"""How endpoints write answers, and what those of chats and completions share: chunks, usage, timings, token ids."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from engine.http.errors import error_body
from engine.http.sse import DONE, EVENTS, event
from engine.service.errors import ApiError
from engine.service.generation import Generation
from engine.service.job import Job
from engine.service.output import Delta
from engine.service.protocol import GenerationRequest
from engine.service.response_store import Record
from engine.service.tokenizer import Tokenizer

encode = msgspec.json.encode


class Format(ABC):
    """How an endpoint writes the answer to one request: whole, or as events and an ending."""

    stream_type: ClassVar[str] = EVENTS
    """``Content-Type`` of a stream."""
    gap: ClassVar[bytes] = b"\n\n"
    """Ends what another server's stream was in when it broke off."""
    whole_stream: ClassVar[re.Pattern[bytes]]
    """What a stream has if it was not cut off, an error included."""
    finish: ClassVar[re.Pattern[bytes] | None] = None
    """What a stream of one choice has at the end of its text, where servers leave out what :attr:`whole_stream`
    demands."""

    def __init__(self, job: Job, tokenizer: Tokenizer, generation: Generation) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self.generation = generation

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """The events for new output."""

    @abstractmethod
    def ending(self) -> bytes:
        """What follows the events of the last delta."""

    @staticmethod
    @abstractmethod
    def broken(error: ApiError) -> bytes:
        """The ending of another server's stream, which broke off."""

    def failure(self, error: ApiError) -> bytes:
        """The ending of a stream that failed."""
        return self.broken(error)

    @abstractmethod
    def whole(self, outputs: Sequence[Delta]) -> bytes:
        """The answer to a request that is not streamed; one complete delta for each choice."""

    def record(self) -> Record | None:
        """The answer as it is stored, once its end was written; ``None``: answers of this API are not."""
        return None

    @classmethod
    def at_once(cls, model: str, options: GenerationRequest) -> bytes | None:
        """The answer to a request that asks for no output; ``None``: it asks for one."""
        return None

    def progress(self, progress: dict[str, Any]) -> bytes:
        """The event that says how far the prompt is, for a request that has ``return_progress``."""
        return b""

    def timings(self) -> dict[str, Any]:
        """Where the time went; known at the end."""
        return self.generation.account().public()


class ChunkFormat(Format):
    """Answers that are objects with ``choices``, and streams of chunks that look like them."""

    whole_stream = re.compile(rb'\ndata: ?(?:\[DONE\]|\{\s*"error"\s*:\s*[{"])')
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, job: Job, tokenizer: Tokenizer, generation: Generation) -> None:
        super().__init__(job, tokenizer, generation)
        self.wants_logprobs = job.api.sampling.logprobs is not None
        self.wants_ids = bool(job.options.return_token_ids)
        options = job.options.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._wants_usage_often = bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._calling: dict[int, list[str]] = {}
        """Arguments of the last call, in pieces, of each choice that has called a tool."""
        self._unfinished = job.num_sequences

    @abstractmethod
    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """The chunks for new output of a choice; ``first``: there was none of this choice before."""

    @abstractmethod
    def choice(self, output: Delta) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""

    def extras(self) -> dict[str, Any]:
        """What an answer that is not streamed has beside its choices."""
        return {}

    def events(self, delta: Delta) -> bytes:
        chunks = self.chunks(delta, delta.index not in self._begun)
        self._begun.add(delta.index)
        self._unfinished -= delta.finish_reason is not None
        if not self._unfinished:
            chunks[-1]["timings"] = self.timings()
        if self._wants_usage or self._wants_usage_often:
            usage = self._usage() if self._wants_usage_often else None
            for chunk in chunks:
                chunk["usage"] = usage
        return b"".join([event(encode(chunk)) for chunk in chunks])

    def ending(self) -> bytes:
        if not self._wants_usage:
            return DONE
        return event(encode(self.chunk() | {"usage": self._usage(), "timings": self.timings()})) + DONE

    @staticmethod
    def broken(error: ApiError) -> bytes:
        return event(error_body(error)) + DONE

    def progress(self, progress: dict[str, Any]) -> bytes:
        return event(encode(self.chunk() | {"prompt_progress": progress}))

    def whole(self, outputs: Sequence[Delta]) -> bytes:
        body = self.object(self.whole_kind, [self.choice(output) for output in outputs]) | self.extras()
        return encode(body | {"usage": self._usage(), "timings": self.timings()})

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self.object(self.chunk_kind, choices)

    def object(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        return {
            "id": job.api.request_id,
            "object": kind,
            "created": job.created,
            "model": job.api.model,
            "system_fingerprint": job.fingerprint,
            "choices": choices,
        }

    def ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self.wants_ids else {}

    def prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.job.prompt(index)} if self.wants_ids else {}

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        found: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.written_tokens,
            },
        }
        if self.job.reasoning is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return found
