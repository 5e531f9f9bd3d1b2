"""One output sequence on its way from the engine to a client: followed, timed, accounted for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.contracts.events import Event, FirstTokenEvent, RequestParameters, TokensEvent
from engine.contracts.request import EngineRequest, FinishReason, Timings
from engine.loop.client import EngineDead, OutputStream
from engine.service.cache_words import written
from engine.service.engines import EngineHandle
from engine.service.errors import engine_died, engine_failed
from engine.service.job import Job
from engine.service.output import Delta, Output
from engine.service.promises import late
from engine.service.timings import Account, Written, make_account

Publish = Callable[[Sequence[Event]], None]


class Served(OutputStream, Protocol):
    """An output stream, and who serves it now: an engine takes over from another one until the first token comes."""

    engine: EngineHandle
    sent_s: float
    """When the sequence was sent to :attr:`engine`; of ``time.monotonic``."""

    @property
    def route(self) -> Mapping[str, str | int]:
        """Why that engine; empty where none was chosen."""
        ...

    @property
    def expected_ttft_ms(self) -> float | None:
        """From :attr:`sent_s` on; ``None``: nothing was expected."""
        ...


class SequenceRun:
    """Follows one sequence to its end. Iterate :meth:`deltas` once; always :meth:`close`, then :meth:`report`."""

    def __init__(
        self,
        job: Job,
        index: int,
        request: EngineRequest,
        stream: Served,
        output: Output,
        publish: Publish,
    ) -> None:
        """``request``: sequence ``index`` of ``job``."""
        self.request = request
        self.output = output
        self.account: Account | None = None
        """Where the time went; known at the end."""
        self._job = job
        self._index = index
        self._stream = stream
        self._publish = publish
        self._reason: FinishReason = "abort"
        self._ended_s = 0.0
        self._detokenize_s = 0.0
        self._first_s: float | None = None
        self._answered_s: float | None = None
        """When there was something else than thoughts."""
        self._last_s = 0.0
        self._itl_ms: list[tuple[float, int]] = []
        self._cached = 0, 0
        self._is_late = False
        """It was ended since its first token was late."""

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Visible output as it comes; the last one has ``finish_reason``. Raises :class:`ApiError`."""
        output = self.output
        timer = self._cancel_late()
        try:
            async for out in self._stream:
                if self._is_late and out.finish_reason is None:
                    continue  # the token that came with the end of its time
                if timer is not None and out.tokens:
                    timer.cancel()
                count, begun_s = len(output.tokens), time.monotonic()
                if not count:
                    self._cached = out.cached_tokens, out.retained_tokens
                delta = output.take(out)
                self._time(len(output.tokens) - count, begun_s)
                if self._answered_s is None and delta is not None and delta.answers:
                    self._answered_s = time.monotonic()
                if out.finish_reason is not None:
                    self._account(output.finish_reason or "error", out.timings)
                    if self._is_late and self._job.promise is not None:
                        raise late(self._job.promise, "was late")
                    if delta is None:
                        raise engine_failed(output.failure)
                    yield delta
                    return
                if delta is not None:
                    yield delta
        except EngineDead as dead:
            self._account("abort" if self._is_late else "error", None)
            if self._is_late and self._job.promise is not None:
                raise late(self._job.promise, "was late") from None
            raise engine_died(dead.cause) from None
        finally:
            if timer is not None:
                timer.cancel()
        self._account("error", None)
        raise engine_failed("its output ended without a finish reason")

    def _cancel_late(self) -> asyncio.TimerHandle | None:
        """End the sequence at the moment when its first token is due, if its class wants that."""
        promise, loop = self._job.promise, asyncio.get_running_loop()
        if promise is None or not promise.slo.cancel_late:
            return None
        left_s = promise.due_s(self._job.arrival.received_s) - time.monotonic()
        return loop.call_later(max(0.0, left_s), self._end_late)

    def _end_late(self) -> None:
        self._is_late = True
        with suppress(EngineDead):
            self._stream.abort()

    def close(self) -> None:
        """Stop the sequence if it still runs: its blocks are free within one step."""
        if self.account is None:
            with suppress(EngineDead):  # a dead engine holds no blocks
                self._stream.abort()

    async def gone(self) -> None:
        """Wait until the engine has let go of a sequence that was closed."""
        with suppress(EngineDead):
            async for out in self._stream:
                if self.account is None and out.finish_reason is not None:
                    self._account("abort", out.timings)

    def report(self, write: Written) -> None:
        """Publish what became of the sequence, once everything was written."""
        if self.account is None:
            self._account("abort", None)
        assert self.account is not None
        api, trace, sampling = self._job.api, self._job.arrival.trace, self.request.sampling
        if self._index:  # one span has the id that the client knows; those of other sequences are beside it
            trace = replace(trace, span_id="")
        parameters = RequestParameters(
            api.kind, api.stream, api.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed
        )
        name, limit = self.request.request_id, sampling.max_tokens
        event = self.account.event(
            name, self._ended_s, self._reason, limit, write, trace, parameters, self._stream.engine.id
        )
        self._publish((event,))

    def cached(self) -> tuple[int, int]:
        """Tokens of the prompt that came from the prefix cache, and that stay in it longer than others; 0 before the
        first token."""
        engine = None if self.account is None else self.account.engine
        return self._cached if engine is None else (engine.cached_tokens, engine.retained_tokens)

    def record(self) -> Mapping[str, Any]:
        """The finished choice, as routers store it and :func:`engine.service.replay.replayed` serves it again."""
        output = self.output
        return {
            "tokens": tuple(output.tokens),
            "logprobs": tuple(output.logprobs),
            "prompt_logprobs": output.prompt_logprobs,
            "finish_reason": output.finish_reason,
            "stop_token": output.stop_token,
        }

    def _time(self, count: int, begun_s: float) -> None:
        """``count`` new tokens came at ``begun_s`` and are text now."""
        now = time.monotonic()
        self._detokenize_s += now - begun_s
        if count == 0:
            return
        event: Event
        engine, promise = self._stream.engine.id, self._job.promise
        slo_class = "" if promise is None else promise.name
        if self._first_s is None:
            self._first_s = now
            ttft_ms, expected_ms = (now - self._job.arrival.received_s) * 1e3, self._expected_ttft_ms() or 0.0
            event = FirstTokenEvent(now, self.request.request_id, ttft_ms, engine, expected_ms, slo_class)
        else:
            itl_ms = (now - self._last_s) * 1e3 / count
            self._itl_ms.append((itl_ms, count))
            event = TokensEvent(now, self.request.request_id, count, itl_ms, engine, slo_class)
        self._last_s = now
        self._publish((event,))

    def _expected_ttft_ms(self) -> float | None:
        """Since the request came, as it was expected when it was sent to its engine."""
        ms = self._stream.expected_ttft_ms
        return None if ms is None else (self._stream.sent_s - self._job.arrival.received_s) * 1e3 + ms

    def _account(self, reason: FinishReason, engine: Timings | None) -> None:
        self._reason, self._ended_s = reason, time.monotonic()
        self.account = make_account(
            self._job.arrival,
            engine,
            sent_s=self._stream.sent_s,
            ended_s=self._ended_s,
            first_token_s=self._first_s,
            answered_s=self._answered_s,
            itl_ms=self._itl_ms,
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.output.tokens),
            detokenize_ms=self._detokenize_s * 1e3,
            route=self._stream.route,
            promise=self._job.promise,
            expected_ttft_ms=self._expected_ttft_ms(),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. Each prompt counts once, however many choices it has; so do its cached tokens."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    written: Mapping[float, int] = field(default_factory=dict)
    """Prompt tokens that came to the cache and are to stay, by the time in seconds for which they are."""

    @property
    def written_tokens(self) -> int:
        return sum(self.written.values())


class Generation:
    """What a job brings so far. Iterate it once: the deltas of all sequences, as they come."""

    def __init__(self, job: Job, runs: Sequence[SequenceRun]) -> None:
        self._job = job
        self._runs = runs
        self._deltas = merge(runs)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def aclose(self) -> None:
        await self._deltas.aclose()

    def usage(self) -> Usage:
        """Token counts so far. Cached tokens are known of sequences that have a token."""
        prompts, n = self._job.api.prompts, self._job.api.n
        new, all_cached = Counter[float](), 0
        for run in self._runs[::n]:
            cached, retained = run.cached()
            all_cached += cached
            new.update(written([(end, seconds) for end, seconds in run.request.retain if end <= retained], cached))
        return Usage(
            sum(map(len, prompts)),
            sum([len(run.output.tokens) for run in self._runs]),
            all_cached,
            sum([run.output.reasoning_tokens for run in self._runs]),
            new,
        )

    def account(self) -> Account:
        """The account of the sequence that took longest, for which the client waited."""
        accounts = [run.account for run in self._runs if run.account is not None]
        return max(accounts, key=lambda account: account.total_ms)


async def merge(runs: Sequence[SequenceRun]) -> AsyncGenerator[Delta, None]:
    """The deltas of all runs as they come. The first failure ends it."""
    if len(runs) == 1:
        async with aclosing(runs[0].deltas()) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()

    async def pump(run: SequenceRun) -> None:
        async for delta in run.deltas():
            queue.put_nowait(delta)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Delta):
                yield item
            else:
                running -= 1
                item.result()
    finally:
        for task in tasks:
            task.cancel()
