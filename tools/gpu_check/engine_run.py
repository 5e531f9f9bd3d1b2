"""An engine in this process, driven step by step: no server, no tokenizer, prompts as token ids."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.assembly.assemble import assemble
from engine.assembly.compose import quoted
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.environment import with_defaults

Tokens = tuple[int, ...]
CPU_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
"""Few: other sections run beside, and models on a CPU are small here."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which every row decoded one token. Milliseconds."""

    wall_ms: float
    """From the results of the step before to this one's."""
    event: StepEvent


class EngineRun:
    """A running engine for these overrides."""

    def __init__(self, model: str | Path, device: str, overrides: Sequence[str] = ()) -> None:
        on_cpu = ["device=cpu", "execution=eager", "attention_kernel=torch", f"threads={CPU_THREADS}"]
        where = on_cpu if device == "cpu" else [f"device={device}"]
        self.plan = assemble([f"model.path={quoted(str(model))}", "exporter=[]", *where, *overrides])
        os.environ.update(with_defaults(os.environ, self.plan.device.kind))
        from engine.startup.build import build_engine

        started = time.monotonic()
        self._engine = build_engine(self.plan)
        self.build_s = time.monotonic() - started
        self.core, self.info = self._engine.core, self._engine.info
        self._submitted = 0

    def submit(self, prompt: Tokens, sampling: SamplingParams, salt: str = "") -> str:
        self._submitted += 1
        name = f"request-{self._submitted}"
        self.core.submit(EngineRequest(name, prompt, sampling, cache_salt=salt))
        return name

    def generate(self, prompts: Sequence[Tokens], count: int, *, together: bool = True) -> list[Tokens]:
        """Greedy tokens, ``count`` of each prompt. Raises ``RuntimeError`` if a request fails."""
        if not together:
            return [self.generate([prompt], count)[0] for prompt in prompts]
        greedy = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        found: dict[str, list[int]] = {self.submit(prompt, greedy): [] for prompt in prompts}
        while self.core.has_work:
            for out in self.core.step().outputs:
                if out.error:
                    raise RuntimeError(out.error)
                if out.request_id in found:
                    found[out.request_id].extend(out.tokens)
        return [tuple(tokens) for tokens in found.values()]

    def logprobs(self, prompts: Sequence[Tokens], top: int = 20) -> list[dict[int, float]]:
        """The most likely first tokens of each prompt and their logprobs, all prompts in one batch."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=top)
        found: dict[str, dict[int, float]] = {self.submit(prompt, sampling): {} for prompt in prompts}
        while self.core.has_work:
            for out in self.core.step().outputs:
                if out.error:
                    raise RuntimeError(out.error)
                for entry in out.logprobs:
                    found[out.request_id] = {entry.token: entry.logprob, **dict(entry.top)}
        return list(found.values())

    def decode(self, batch: int, context: int, count: int) -> list[DecodeStep]:
        """``batch`` requests of ``context`` prompt tokens; only steps in which all of them decode."""
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        vocab = self.info.vocab_size - 8
        for i in range(batch):
            self.submit(tuple((i * 7919 + j * 31) % vocab + 4 for j in range(context)), sampling)
        steps: list[DecodeStep] = []
        before = time.perf_counter()
        while self.core.has_work:
            done = self.core.step()
            now = time.perf_counter()
            for out in done.outputs:
                if out.error:
                    raise RuntimeError(out.error)
            events = [event for event in done.events if isinstance(event, StepEvent)]
            for event in events:
                if event.num_decode_tokens == event.num_requests == batch and event.num_prefill_tokens == 0:
                    steps.append(DecodeStep((now - before) * 1e3, event))
            before = now if events else before
        if len(steps) < 4:
            raise RuntimeError(f"{len(steps)} steps in which all {batch} requests decode; expected {count - 1}")
        return steps[2:]

    def first_token_ms(self, prompt_tokens: int) -> float:
        """From submission of a prompt nobody has seen to its first token."""
        return self.first_token(prompt_tokens)[0]

    def first_token(self, prompt_tokens: int) -> tuple[float, list[StepEvent]]:
        """The same, and the steps that computed the prompt: what of them the host took, and what the device."""
        self._submitted += 1
        vocab, salt = self.info.vocab_size - 8, f"salt-{self._submitted}"
        prompt = tuple((j * 31 + self._submitted) % vocab + 4 for j in range(prompt_tokens))
        started = time.perf_counter()
        self.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), salt)
        took, steps = 0.0, list[StepEvent]()
        while self.core.has_work:
            done = self.core.step()
            steps += [event for event in done.events if isinstance(event, StepEvent) and event.num_prefill_tokens]
            for out in done.outputs:
                if out.error:
                    raise RuntimeError(out.error)
                took = took or (time.perf_counter() - started) * 1e3
        return took, steps

    def close(self) -> None:
        self.core.close()
