"""Where a request goes, and what comes back: the router is asked, a job becomes sequences, their deltas one stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from engine.contracts.events import StoredAnswersEvent
from engine.contracts.exporter import Transcript
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.router import Answer, ApiRequest, Attempts, ToUrl
from engine.loop.client import EngineDead, OutputStream
from engine.service.bus import EventBus
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError, engine_died
from engine.service.generation import Generation, SequenceRun
from engine.service.job import Job
from engine.service.output import Output
from engine.service.output_text import OutputText
from engine.service.parts import PartParser
from engine.service.placing import Placing
from engine.service.promises import Promise, late
from engine.service.remote_prefill import prefill_for
from engine.service.replay import replayed
from engine.service.sending import Sending
from engine.service.timings import Written
from engine.service.tokenizer import Tokenizer
from engine.service.validation import choice_seed

ABORTED_S = 5.0
"""How long the places of an aborted request may stay taken, waiting for the engine."""


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Sends jobs where the router says. Use on the event loop's thread only."""

    placing: Placing
    engines: Mapping[str, EngineHandle]
    """The engines by id. The first one's model is that of stored answers, too."""
    bus: EventBus

    def place(self, api: ApiRequest) -> Attempts | ToUrl | Answer:
        """See :meth:`Placing.place`. Engines that compute prompts for others are asked where no other one can be."""
        others = [engine for engine in self.engines.values() if engine.role != "prefill"]
        able = others if any(engine.takes_requests for engine in others) else self.engines.values()
        return self.placing.place(api, [engine.view for engine in able])

    @asynccontextmanager
    async def generate(
        self, job: Job, route: Attempts | Answer, written: Callable[[], Written] = Written
    ) -> AsyncIterator[Generation]:
        """The deltas of all sequences of a job as they come; iterating raises :class:`ApiError` when one of them fails.

        A block that is left with an error, or before the end, ends what still runs; the router is told of a job that
        has ended well. ``written``: what waiting for the client took.
        """
        runs, sendings = list[SequenceRun](), list[Sending]()
        try:
            if isinstance(route, Answer):
                self._replay(job, route, runs)
            else:
                self._send(job, route, runs, sendings)
            async with aclosing(Generation(job, runs)) as generation:
                yield generation
        except BaseException:
            await _abort(runs)
            raise
        finally:
            for run in runs:
                run.close()
                if self.bus.wants_transcripts:
                    asked = run.request
                    self.bus.transcribe(Transcript(asked.request_id, asked.prompt, run.output.tokens, asked.cache_salt))
                run.report(written())
            for sending in sendings:
                sending.close()
        if all(run.output.finish_reason is not None for run in runs):
            self.placing.finished(job.api, Answer(tuple(run.record() for run in runs)))
            if (tally := self.placing.tally()) is not None:
                self.bus.publish((StoredAnswersEvent(time.monotonic(), tally),))

    def _send(self, job: Job, route: Attempts, runs: list[SequenceRun], sendings: list[Sending]) -> None:
        """Fill ``runs`` and ``sendings``, which the caller closes: whatever goes wrong on the way, none of them runs on
        for nobody."""
        engines = [self.engines[name] for name in route.engines]
        if not any(engine.takes_requests for engine in engines):
            engines[0].check()
        if job.promise is not None and job.promise.slo.refuse_late:
            _refuse_late(job, job.promise, route, engines)
        told = set[str]()

        def sent(engine: EngineHandle) -> None:
            if engine.id not in told:
                told.add(engine.id)
                self.placing.begun(job.api, engine.id)

        reason = route.reason if len(self.engines) > 1 else None
        max_len = min(engine.max_len for engine in engines)

        def again() -> Sequence[EngineHandle]:
            return self._place_again(job.api, max_len)

        for index in range(job.num_sequences):
            request = _engine_request(job, index, max_len)
            cached_tokens = route.cached_tokens[index // job.api.n] if route.cached_tokens else 0
            alone = job.num_sequences == 1  # several of one prompt share its blocks
            prefill = prefill_for(request, cached_tokens, engines[0], self.engines.values()) if alone else None
            try:
                sending = Sending(
                    request,
                    engines,
                    sent,
                    cached_tokens=cached_tokens,
                    reason=reason if prefill is None else f"{reason}; prompt sent to {prefill.engine.id}",
                    again=again,
                    fleet=self.engines,
                    promise=job.promise,
                    prefill=prefill,
                )
            except EngineDead as dead:
                if prefill is not None:
                    prefill.close()
                raise engine_died(dead.cause) from None
            sendings.append(sending)
            output = _output(engines[0].tokenizer, job, index, request.sampling, sending)
            runs.append(SequenceRun(job, index, request, sending, output, self.bus.publish))

    def _place_again(self, api: ApiRequest, max_len: int) -> Sequence[EngineHandle]:
        """Engines for what has to leave all those that the router named: others may have come back meanwhile."""
        if not any(engine.takes_requests for engine in self.engines.values()):
            return ()
        try:
            route = self.place(api)
        except ApiError:  # refused, or the router failed, which was reported
            return ()
        names = route.engines if isinstance(route, Attempts) else ()
        return [engine for engine in map(self.engines.__getitem__, names) if engine.max_len >= max_len]

    def _replay(self, job: Job, answer: Answer, runs: list[SequenceRun]) -> None:
        """Fill ``runs`` with a stored answer."""
        engine = next(iter(self.engines.values()))
        for index, choice in enumerate(answer.choices):
            request = _engine_request(job, index, engine.max_len)
            stream = replayed(request.request_id, choice, engine, answer.reason)
            output = _output(engine.tokenizer, job, index, request.sampling, stream)
            runs.append(SequenceRun(job, index, request, stream, output, self.bus.publish))


async def _abort(runs: Sequence[SequenceRun]) -> None:
    """End what a client left behind. Its places in the queue are taken until the engine knows: clients who come and go
    at once cannot send the engine more than that."""
    for run in runs:
        run.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORTED_S):
            for run in runs:
                await run.gone()


def _refuse_late(job: Job, promise: Promise, route: Attempts, engines: Sequence[EngineHandle]) -> None:
    """Raises :class:`ApiError` ``overloaded`` where the first token is expected too late at every engine."""
    elapsed_ms = (time.monotonic() - job.arrival.received_s) * 1e3
    tokens = max(0, max(map(len, job.api.prompts)) - max(route.cached_tokens, default=0))
    taking = [engine.forecast for engine in engines if engine.takes_requests]
    expected = [(forecast, forecast.expect(promise, tokens)) for forecast in taking]
    if expected and all(forecast.is_too_late(each, elapsed_ms) for forecast, each in expected):
        ms = elapsed_ms + min(each.ms or 0.0 for _, each in expected)
        raise late(promise, f"is expected after {ms:.0f} ms", math.ceil((ms - promise.slo.ttft_ms) / 1e3))


def _engine_request(job: Job, index: int, max_len: int) -> EngineRequest:
    """One sequence, with its own seed, and no more tokens than its own prompt leaves room for."""
    api, prompt = job.api, job.prompt(index)
    sampling = msgspec.structs.replace(
        api.sampling,
        seed=choice_seed(api.sampling.seed, index % api.n),
        max_tokens=min(api.sampling.max_tokens, max_len - len(prompt)),
    )
    return EngineRequest(
        job.name(index),
        prompt,
        sampling,
        priority=job.options.priority or 0,
        cache_salt=api.cache_salt,
        client=job.client,
        group=api.request_id if job.num_sequences > 1 else "",
        ttft_ms=0.0 if job.promise is None else job.promise.slo.ttft_ms,
        itl_ms=0.0 if job.promise is None else job.promise.slo.itl_ms,
        retain=job.retain_of(index),
    )


def _output(tokenizer: Tokenizer, job: Job, index: int, sampling: SamplingParams, stream: OutputStream) -> Output:
    tools, reasoning = job.tools, job.reasoning
    shows_special = bool((tools and tools.shows_special) or (reasoning and reasoning.shows_special))
    text = OutputText(
        tokenizer,
        job.prompt(index),
        job.api.stop,
        include_stop=bool(job.options.include_stop_str_in_output),
        skip_special_tokens=job.options.skip_special_tokens is not False and not shows_special,
        min_tokens=sampling.min_tokens,
    )
    parser: PartParser | None = None if tools is None else tools.parser()
    if reasoning is not None:
        parser = reasoning.parser(parser)
    wants_logprobs = sampling.logprobs is not None
    return Output(text, lambda: stream.abort("stop"), index=index, wants_logprobs=wants_logprobs, parser=parser)
