"""From deltas to the messages of ``Generate``.

A stream is a ``chunk`` for each delta, with its new tokens, and for each choice a ``complete`` at its end, without
tokens; an answer that is not streamed is a ``complete`` for each choice, with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.contracts.request import TokenLogprobs
from engine.service.generate_request import GenerateOptions
from engine.service.generation import Generation
from engine.service.job import Job
from engine.service.output import Delta, PromptLogprobs


class GenerateFormat:
    """Writes the answers to one request."""

    def __init__(self, job: Job, options: GenerateOptions, generation: Generation) -> None:
        self._job = job
        self._options = options
        self._generation = generation
        self._prompt_tokens = len(job.prompt(0))
        self._counts = [0] * job.num_sequences

    def messages(self, delta: Delta) -> list[Any]:
        """Those of a stream for new output."""
        found = []
        if delta.token_ids or delta.prompt_logprobs:
            found.append(self._chunk(delta))
        if delta.finish_reason is not None:
            found.append(self._complete(delta, streamed=True))
        return found

    def whole(self, output: Delta) -> Any:
        """The whole answer of a choice."""
        self._counts[output.index] = len(output.token_ids)
        return self._complete(output, streamed=False)

    def _chunk(self, delta: Delta) -> Any:
        self._counts[delta.index] += len(delta.token_ids)
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(delta.token_ids),
            index=delta.index,
        )
        if delta.finish_reason is not None:
            chunk.cached_tokens = self._generation.usage().cached_tokens
        self._add_logprobs(chunk, delta)
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, delta: Delta, *, streamed: bool) -> Any:
        complete = pb.GenerateComplete(
            output_ids=() if streamed else delta.token_ids,
            finish_reason=delta.finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._counts[delta.index],
            cached_tokens=self._generation.usage().cached_tokens,
            index=delta.index,
        )
        if not streamed:
            self._add_logprobs(complete, delta)
        if delta.stop is not None:
            complete.matched_stop_str = delta.stop
        elif delta.finish_reason == "stop" and delta.token_ids[-1:] and self._is_asked_stop(delta.token_ids[-1]):
            complete.matched_token_id = delta.token_ids[-1]
        if self._job.num_sequences == 1:
            engine = self._generation.account().engine
            complete.spec_draft_tokens, complete.spec_accepted_tokens = engine.drafted_tokens, engine.accepted_tokens
        return pb.GenerateResponse(complete=complete)

    def _is_asked_stop(self, token: int) -> bool:
        return token in (self._options.stop_token_ids or ())

    def _add_logprobs(self, message: Any, delta: Delta) -> None:
        if (k := self._options.logprobs) is not None:
            shown = [token.logprobs for token in delta.tokens if token.logprobs is not None]
            _fill(message.output_logprobs, shown, k)
        if (k := self._options.prompt_logprobs) is not None and delta.prompt_logprobs:
            _fill_prompt(message.input_logprobs, self._job.prompt(delta.index), delta.prompt_logprobs, k)


def _fill(message: Any, entries: Sequence[TokenLogprobs], k: int) -> None:
    message.token_ids.extend([entry.token for entry in entries])
    message.token_logprobs.extend([entry.logprob for entry in entries])
    if k:
        message.top_logprobs.extend([_top(entry, k) for entry in entries])


def _fill_prompt(message: Any, prompt: Sequence[int], entries: PromptLogprobs, k: int) -> None:
    """The first token of a prompt has none."""
    message.token_ids.extend(prompt)
    for entry in entries:
        message.token_logprobs.append(pb.InputTokenLogProb(value=None if entry is None else entry.logprob))
        if k:
            message.top_logprobs.append(pb.TopLogProbs() if entry is None else _top(entry, k))


def _top(entry: TokenLogprobs, k: int) -> Any:
    top = entry.top[:k]
    return pb.TopLogProbs(token_ids=[token for token, _ in top], values=[logprob for _, logprob in top])
