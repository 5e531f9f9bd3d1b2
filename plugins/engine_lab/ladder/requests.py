"""One run of the workload against one engine, in the form that a rung gives its requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import aiohttp

from engine_lab.bench.load import Limit, closed_loop, open_loop
from engine_lab.bench.probe import ProbeError
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.run import text_of, watched, workload_of
from engine_lab.bench.target import HttpSender, Target
from engine_lab.bench.workload import BenchRequest, arrivals
from engine_lab.ladder.figures import run_of
from engine_lab.ladder.options import LadderOptions
from engine_lab.ladder.record import Ladder, Run
from engine_lab.ladder.rungs import P99, Form

NONCE = "ladder"
clock = time.perf_counter


class Requests:
    """Makes and sends the requests of a ladder: the same ones for both sides of a pair."""

    def __init__(self, session: aiohttp.ClientSession, options: LadderOptions, ladder: Ladder) -> None:
        """Raises ``ValueError`` if there is no text to cut prompts from."""
        self._session, self._options, self._ladder = session, options, ladder
        self.text = text_of(options)

    def prompts(self, form: Form, seed: int) -> Iterator[BenchRequest]:
        """Endless; another seed gives other prompts and another shared part."""
        options, ladder = self._options, self._ladder
        workload = workload_of(options, self.text, ladder.chars_per_token or 1.0, NONCE, seed)
        limit = max_tokens(form, ladder.output_lengths)
        for request in workload.requests():
            prompt = request.prompt if form.static_first else own_part_first(request.prompt, options.shared_prefix)
            most = request.max_tokens if limit is None else min(limit, request.max_tokens)
            yield replace(request, prompt=prompt, max_tokens=most)

    def target(self, url: str, form: Form, salt: str) -> Target:
        options = self._options
        return Target(
            url,
            self._ladder.model,
            options.endpoint,
            ignore_eos=options.ignore_eos,
            stream=form.stream,
            cache_salt=salt,
        )

    async def run(self, url: str, form: Form, seed: int, salt: str) -> Run:
        """``salt`` keeps this run's prompts out of the prefix cache of all others. Raises :class:`ProbeError` if every
        request failed."""
        records, lags_s = await self.send(url, form, seed, salt, self._options.requests)
        if not any(record.ok for record in records):
            raise ProbeError(f"{url}: every request of a run failed, the first with: {records[0].detail}")
        return run_of(records, lags_s, self._options.slo)

    async def send(
        self, url: str, form: Form, seed: int, salt: str, count: int
    ) -> tuple[list[RequestRecord], list[float]]:
        """Records of ``count`` requests, and how late the client's event loop woke, in seconds."""
        options, limit = self._options, Limit(count, None)
        sender = HttpSender(self._session, self.target(url, form, salt), clock)
        requests = self.prompts(form, seed)
        async with watched(clock) as lag:
            if options.rate is not None:
                times = arrivals(options.rate, seed)
                records = await open_loop(sender, requests, times, limit, clock, lambda record: None)
            else:
                records = await closed_loop(sender, requests, options.concurrency, limit, clock, lambda record: None)
        return records, lag.lags_s


def own_part_first(prompt: str | tuple[int, ...], shared: float) -> str | tuple[int, ...]:
    """The prompt with its shared part at its end."""
    count = round(len(prompt) * shared)
    if isinstance(prompt, str):
        return prompt[count:] + prompt[:count]
    return prompt[count:] + prompt[:count]


def max_tokens(form: Form, observed: Sequence[int]) -> int | None:
    """The limit that a form sets; its ``p99`` is the nearest rank of what was observed."""
    if form.max_tokens == P99:
        return sorted(observed)[ceil(len(observed) * 0.99) - 1] if observed else None
    return None if form.max_tokens == "none" else int(form.max_tokens)
