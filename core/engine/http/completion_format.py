"""The bodies of ``/v1/completions``, whole and in chunks: one object type for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contracts.request import TokenLogprobs
from engine.http.answering import Job
from engine.http.token_ids import TokenIds
from engine.service.generation import Delta, SequenceRun
from engine.service.logprobs import completion_logprobs
from engine.service.tokenizer import Tokenizer

OffsetToken = tuple[int, int, TokenLogprobs | None]


class CompletionFormat:
    """``prompt_texts``: what ``echo`` puts before the output of each prompt."""

    def __init__(
        self, job: Job, runs: Sequence[SequenceRun], tokenizer: Tokenizer, prompt_texts: Sequence[str]
    ) -> None:
        self._job = job
        self._runs = runs
        self._ids = TokenIds(job, runs)
        self._tokenizer = tokenizer
        self._prompt_texts = prompt_texts
        self._wants_logprobs = job.api.sampling.logprobs is not None

    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        echo = self._job.api.echo and first
        text = self._echoed(delta.index) + delta.text if echo else delta.text
        chunks = []
        if text or delta.tokens:
            chunks.append(self._object([self._choice(delta, text, echo, None, first)]))
        if delta.finish_reason is not None:
            empty = Delta(delta.index, "")
            chunks.append(self._object([self._choice(empty, "", False, delta.finish_reason, first and not chunks)]))
        return chunks

    def whole(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        echo = self._job.api.echo
        return self._object(
            [
                self._choice(out, self._echoed(out.index) + out.text if echo else out.text, echo, out.finish_reason)
                for out in outputs
            ]
        )

    def last_chunk(self) -> dict[str, Any]:
        return self._object([])

    def _echoed(self, index: int) -> str:
        return self._prompt_texts[index // self._job.api.n]

    def _choice(
        self, delta: Delta, text: str, echo: bool, finish_reason: str | None, first: bool = True
    ) -> dict[str, Any]:
        logprobs = self._logprobs(delta, echo) if self._wants_logprobs else None
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._ids.wanted and first:
            choice["prompt_token_ids"] = self._job.api.prompts[delta.index // self._job.api.n]
        return choice | self._ids.new(delta.index)

    def _logprobs(self, delta: Delta, echo: bool) -> dict[str, Any]:
        """Offsets count from the beginning of the text that the client sees."""
        base = len(self._echoed(delta.index)) if self._job.api.echo else 0
        tokens = self._prompt_tokens(delta.index) if echo else []
        tokens += [(shown.token, base + shown.offset, shown.logprobs) for shown in delta.tokens]
        return completion_logprobs(tokens, self._tokenizer.token_bytes)

    def _prompt_tokens(self, index: int) -> list[OffsetToken]:
        prompt = self._job.api.prompts[index // self._job.api.n]
        entries = self._runs[index].prompt_logprobs
        text = self._echoed(index)
        stream = self._tokenizer.stream(skip_special_tokens=True)
        tokens: list[OffsetToken] = []
        offset = 0
        for i, token in enumerate(prompt):
            tokens.append((token, min(offset, len(text)), entries[i] if i < len(entries) else None))
            offset += len(stream.feed(token)) or self._spelled(token, text, offset)
        return tokens

    def _spelled(self, token: int, text: str, offset: int) -> int:
        """Characters of a special token that the prompt spells at ``offset``; one that was added has none."""
        if token not in self._tokenizer.hidden:
            return 0
        literal = self._tokenizer.token_bytes[token].decode()
        return len(literal) if text.startswith(literal, offset) else 0

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job = self._job
        return {
            "id": job.api.request_id,
            "object": "text_completion",
            "created": job.created,
            "model": job.api.model,
            "system_fingerprint": job.fingerprint,
            "choices": choices,
        }
