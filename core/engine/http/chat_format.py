"""The bodies of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from engine.http.format import Format
from engine.service.logprobs import chat_logprobs
from engine.service.output import Delta

ROLE = {"role": "assistant", "content": "", "refusal": None}


class ChatFormat(Format):
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def chunks(self, delta: Delta, first: bool) -> list[dict[str, Any]]:
        chunks = []
        index, ids = delta.index, self.ids(delta)
        if first:
            chunks.append(self.chunk(_choice(index, ROLE)) | self.prompt_ids(index))
        text = delta.text
        if text or delta.tokens:
            chunks.append(self.chunk(_choice(index, {"content": text}, self._logprobs(delta)) | ids))
        if delta.finish_reason is not None:
            ids = self.ids(Delta(index)) if text or delta.tokens else ids
            chunks.append(self.chunk(_choice(index, {}, finish_reason=delta.finish_reason) | ids))
        return chunks

    def choice(self, output: Delta) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            **self.ids(output),
        }

    def extras(self) -> dict[str, Any]:
        return self.prompt_ids(0)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self.tokenizer.token_bytes) if self.wants_logprobs else None


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
