"""The engine without a server: prompts in, completions out, in this process.

.. code-block:: python

    from engine import LLM

    llm = LLM("bundled", overrides=["+preset=latency"])
    print(llm.chat([{"role": "user", "content": "What does json.dumps do?"}]).text)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.assembly.assemble import alone, assemble
from engine.assembly.compose import quoted
from engine.contracts.request import EngineRequest, Timings, TokenLogprobs
from engine.loop.environment import with_defaults
from engine.loop.messages import EngineStats
from engine.service.errors import ApiError
from engine.service.offline_arguments import (
    check_queueing,
    checked_sampling,
    checked_stops,
    checked_text,
    checked_tokens,
)
from engine.service.output import Delta, Output, joined
from engine.service.output_text import OutputText
from engine.service.parsing import parse_chat
from engine.service.parts import CallText
from engine.service.tokenizer import Tokenizer
from engine.service.tools import ToolUse, tool_grammar, tool_use


class GenerationFailed(RuntimeError):
    """A request ended with an error; the message is the engine's own."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    timings: Timings | None
    calls: tuple[CallText, ...] = ()
    """Of tools, as :meth:`LLM.chat` was given some; they are no part of :attr:`text`."""


def _completion(output: Output, whole: Delta, timings: Timings | None) -> Completion:
    return Completion(
        whole.text,
        whole.token_ids,
        str(whole.finish_reason),
        tuple(output.logprobs),
        whole.prompt_logprobs,
        timings,
        tuple(whole.calls),
    )


class LLM:
    """A model and an engine, ready to generate. ``overrides`` are the same as on the command line."""

    def __init__(self, path: str = "bundled", overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> None:
        """``config_dirs``: folders with presets and variants of your own.

        Raises :class:`engine.assembly.errors.AssemblyError` with every problem of the configuration."""
        if isinstance(overrides, str):
            raise TypeError(f"overrides={overrides!r} is one string; expected a list, such as [{overrides!r}]")
        words = [f"model.path={quoted(path)}", *overrides]
        self.plan = alone(assemble(words, config_dirs=config_dirs, download=True))
        os.environ.update(with_defaults(os.environ, self.plan.device.kind))
        from engine.startup.build import build_engine  # imports torch, which reads the environment

        self.tokenizer = Tokenizer.from_directory(self.plan.model.path, self.plan.model.vocab_size)
        self.tokenizer.most_tokens = max(self.tokenizer.most_tokens, self.plan.max_len)
        self._engine = build_engine(self.plan)
        self.info = self._engine.info
        self.core = self._engine.core
        self._requests = 0
        self._generating = threading.Lock()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        stop: Sequence[str] = (),
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Completion]:
        """Complete every prompt (text or token ids), all in one batch, in the order given. Calls from several threads
        run one after another.

        ``sampling``: fields of :class:`engine.contracts.request.SamplingParams`. Raises ``ValueError`` or
        ``TypeError`` for arguments that make no sense, before anything runs, and :class:`GenerationFailed` if any of
        the prompts failed.
        """
        return self._generate(prompts, None, stop, priority, cache_salt, sampling)

    def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        tools: ToolUse | None,
        stop: Sequence[str],
        priority: int,
        cache_salt: str,
        sampling: Mapping[str, Any],
    ) -> list[Completion]:
        """``tools``: what the outputs may call."""
        if isinstance(prompts, str):
            raise TypeError("prompts is one string; expected a list of prompts")
        params = checked_sampling(sampling, self.info.vocab_size)
        check_queueing(priority, cache_salt)
        if params.grammar is not None:
            self._engine.grammars.prepare(params.grammar)  # raises what is wrong with it
        stops = checked_stops(stop)
        texts = [self._tokens(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        with self._generating:
            first = self._requests
            self._requests += len(texts)
            requests = [
                EngineRequest(f"offline-{first + i}", tokens, params, priority, cache_salt)
                for i, tokens in enumerate(texts)
            ]
            return self._complete(requests, stops, tools)

    def _complete(
        self, requests: Sequence[EngineRequest], stops: tuple[str, ...], tools: ToolUse | None
    ) -> list[Completion]:
        outputs = {request.request_id: self._output(request, stops, tools) for request in requests}
        try:
            for request in requests:
                self.core.submit(request)
            done = self._run(outputs)
        finally:
            self.core.abort(list(outputs))  # only what is left after a failure
            while self.core.has_work:  # steps in flight retire and give their blocks back
                self.core.step()
        return [done[request_id] for request_id in outputs]

    def _output(self, request: EngineRequest, stops: tuple[str, ...], tools: ToolUse | None) -> Output:
        text = OutputText(
            self.tokenizer,
            request.prompt,
            stops,
            skip_special_tokens=tools is None or not tools.shows_special,
            min_tokens=request.sampling.min_tokens,
        )
        parser = None if tools is None else tools.parser()
        return Output(text, lambda: self.core.abort([request.request_id], "stop"), parser=parser)

    def _run(self, outputs: dict[str, Output]) -> dict[str, Completion]:
        deltas: dict[str, list[Delta]] = {name: [] for name in outputs}
        done: dict[str, Completion] = {}
        while len(done) < len(outputs):
            for out in self.core.step().outputs:
                output = outputs.get(out.request_id)
                if output is None:
                    continue  # left over from a batch that failed
                delta = output.take(out)
                if output.failure:
                    raise GenerationFailed(output.failure)
                if delta is not None:
                    deltas[out.request_id].append(delta)
                if out.finish_reason is not None:
                    done[out.request_id] = _completion(output, joined(deltas[out.request_id]), out.timings)
        return done

    def _tokens(self, prompt: str | Sequence[int], where: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode_now(checked_text(prompt, where))
        return checked_tokens(prompt, self.info.vocab_size, where)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Completion:
        """Answer a conversation. ``messages``, ``chat_template_kwargs``, ``tools`` and ``tool_choice`` are those of
        ``/v1/chat/completions``, and the completion has the calls; the others are as for :meth:`generate`, a
        ``grammar`` beside tools that of an output that calls none. Raises ``ValueError`` for what the server refuses,
        in its words, and what :meth:`generate` raises."""
        try:
            asked = parse_chat(
                messages, chat_template_kwargs=chat_template_kwargs, tools=tools, tool_choice=tool_choice
            )
            use = tool_use(asked.options, self.tokenizer)
            if use is not None:
                grammar = checked_sampling(sampling, self.info.vocab_size).grammar
                sampling["grammar"] = tool_grammar(asked.options, use, self.tokenizer.special_ids, grammar)
        except ApiError as error:
            raise ValueError(error.message) from None
        prompt = self.tokenizer.encode_chat_now(asked.conversation)
        return self._generate([prompt], use, stop, priority, cache_salt, sampling)[0]

    def stats(self) -> EngineStats:
        """What the engine holds right now: blocks, rows and queues."""
        return self.core.stats()

    def expert_load(self) -> dict[int, tuple[int, ...]]:
        """By layer, how many pairs of a token and an expert went to each expert so far; empty unless
        ``parallelism.count_experts=true``."""
        return dict(self._engine.expert_load())

    def close(self) -> None:
        self.core.close()
        self.tokenizer.close()
