"""The bodies of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.http.answering import Job
from engine.http.token_ids import TokenIds
from engine.service.detokenizer import TokenBytes
from engine.service.generation import Delta, SequenceRun
from engine.service.logprobs import chat_logprobs


class ChatFormat:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, job: Job, runs: Sequence[SequenceRun], token_bytes: TokenBytes) -> None:
        self._job = job
        self._ids = TokenIds(job, runs)
        self._token_bytes = token_bytes
        self._wants_logprobs = job.api.sampling.logprobs is not None

    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = []
        if first:
            chunks.append(
                self._chunk(delta.index, {"role": "assistant", "content": "", "refusal": None}) | self._prompt_ids()
            )
        if delta.text or delta.tokens:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, self._logprobs(delta), ids=True))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {}, finish_reason=delta.finish_reason, ids=True))
        return chunks

    def whole(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        return self._object("chat.completion", [self._choice(output) for output in outputs]) | self._prompt_ids()

    def last_chunk(self) -> dict[str, Any]:
        return self._object("chat.completion.chunk", [])

    def _choice(self, output: Delta) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            **self._ids.new(output.index),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        ids: bool = False,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice | self._ids.new(index) if ids else choice])

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.api.prompts[0]} if self._ids.wanted else {}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self._token_bytes) if self._wants_logprobs else None

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._job
        return {
            "id": job.api.request_id,
            "object": kind,
            "created": job.created,
            "model": job.api.model,
            "system_fingerprint": job.fingerprint,
            "choices": choices,
        }
