"""The bodies of ``/v1/completions``, whole and in chunks: one object type for both."""

from __future__ import annotations

from typing import Any

from engine.contracts.request import TokenLogprobs
from engine.http.format import ChunkFormat
from engine.service.logprobs import completion_logprobs
from engine.service.output import Delta

OffsetToken = tuple[int, int, TokenLogprobs | None]


class CompletionFormat(ChunkFormat):
    """Writes ``text_completion`` objects."""

    whole_kind = chunk_kind = "text_completion"

    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        echo = self.job.api.echo and first
        text = self._echoed(delta.index) + delta.text if echo else delta.text
        chunks = []
        if text or delta.tokens:
            chunks.append(self.chunk(self._choice(delta, text, echo, None, first)))
        if delta.finish_reason is not None:
            rest = Delta(delta.index) if chunks else Delta(delta.index, token_ids=delta.token_ids)
            chunks.append(self.chunk(self._choice(rest, "", False, delta.finish_reason, first and not chunks)))
        return chunks

    def choice(self, output: Delta) -> dict[str, Any]:
        echo = self.job.api.echo
        text = self._echoed(output.index) + output.text if echo else output.text
        return self._choice(output, text, echo, output.finish_reason, first=True)

    def _echoed(self, index: int) -> str:
        return self.job.prompt_texts[index // self.job.api.n]

    def _choice(self, delta: Delta, text: str, echo: bool, finish_reason: str | None, first: bool) -> dict[str, Any]:
        logprobs = self._logprobs(delta, echo) if self.wants_logprobs else None
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice | (self.prompt_ids(delta.index) if first else {}) | self.ids(delta)

    def _logprobs(self, delta: Delta, echo: bool) -> dict[str, Any]:
        """The logprobs of a delta. Offsets count from the beginning of the text that the client sees."""
        base = len(self._echoed(delta.index)) if self.job.api.echo else 0
        tokens = self._prompt_tokens(delta) if echo else []
        tokens += [(shown.token, base + shown.offset, shown.logprobs) for shown in delta.tokens]
        return completion_logprobs(tokens, self.tokenizer.token_bytes)

    def _prompt_tokens(self, delta: Delta) -> list[OffsetToken]:
        prompt, entries = self.job.prompt(delta.index), delta.prompt_logprobs
        text = self._echoed(delta.index)
        stream = self.tokenizer.stream(skip_special_tokens=True)
        tokens: list[OffsetToken] = []
        offset = 0
        for i, token in enumerate(prompt):
            tokens.append((token, min(offset, len(text)), entries[i] if i < len(entries) else None))
            offset += len(stream.feed(token)) or self._spelled(token, text, offset)
        return tokens

    def _spelled(self, token: int, text: str, offset: int) -> int:
        """Characters of a special token that the prompt spells at ``offset``; one that was added has none."""
        if token not in self.tokenizer.hidden:
            return 0
        literal = self.tokenizer.token_bytes[token].decode()
        return len(literal) if text.startswith(literal, offset) else 0
