"""One run of the load against one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import aiohttp

from engine_lab.bench.load import Limit, LoopLag, closed_loop, open_loop
from engine_lab.bench.main import background, no_garbage_collection, read_text
from engine_lab.bench.probe import calibrate
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.target import HttpSender, Target
from engine_lab.bench.workload import BenchRequest, Workload, arrivals, random_text
from engine_lab.sweep.options import Load

NONCE = "sweep"
SAMPLE_CHARS = 4000
clock = time.perf_counter


class Requests:
    """Makes and sends the requests of a sweep: the same ones for every set in a pass."""

    def __init__(self, session: aiohttp.ClientSession, load: Load) -> None:
        """Raises ``ValueError`` if there is no text to cut prompts from."""
        self._session, self._load = session, load
        self._text = read_text(load.text_file) if load.text_file else random_text(load.seed)

    async def chars_per_token(self, url: str, model: str) -> float:
        """Of the text that prompts are cut from. Raises ``ProbeError``."""
        if self._load.prompt_ids is not None:
            return 1.0
        target = self._target(url, model, "calibration")
        return (await calibrate(self._session, target, self._text[:SAMPLE_CHARS], None)).chars_per_token

    def _target(self, url: str, model: str, salt: str) -> Target:
        load = self._load
        return Target(
            url, model, load.endpoint, temperature=load.temperature, ignore_eos=load.ignore_eos, cache_salt=salt
        )

    def _prompts(self, chars_per_token: float, seed: int, stream: str) -> Iterator[BenchRequest]:
        load = self._load
        made = Workload(
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            shared_prefix=load.shared_prefix,
            chars_per_token=chars_per_token,
            nonce=NONCE,
            seed=seed,
            text=self._text,
            vocab_size=load.prompt_ids,
        )
        return made.requests(stream)

    async def send(
        self, url: str, model: str, chars_per_token: float, number: int
    ) -> tuple[list[RequestRecord], list[float]]:
        """The requests of a pass, after the warm-up: their records, and how late the client's event loop woke, in
        seconds. Nothing of other passes is in the prefix cache for them."""
        load, seed = self._load, self._load.seed + number
        sender = HttpSender(self._session, self._target(url, model, f"pass {number}"), clock)
        for stream, count in (("warmup", load.warmup), ("measured", load.requests)):
            lag, limit, prompts = LoopLag(clock), Limit(count, None), self._prompts(chars_per_token, seed, stream)
            with no_garbage_collection():
                async with background(lag):
                    if load.rate is not None and stream == "measured":
                        times = arrivals(load.rate, seed)
                        records = await open_loop(sender, prompts, times, limit, clock, lambda record: None)
                    else:
                        records = await closed_loop(
                            sender, prompts, load.concurrency, limit, clock, lambda record: None
                        )
        return records, lag.lags_s
