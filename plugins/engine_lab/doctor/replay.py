"""The recorded requests again: lengths, arrivals, common beginning, temperature and streaming, with other text."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean

import aiohttp
from msgspec.structs import replace

from engine_lab.bench.load import Limit, open_loop
from engine_lab.bench.probe import calibrate, find_model
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.target import HttpSender, Target
from engine_lab.bench.workload import BenchRequest, random_text
from engine_lab.doctor.classes import Recorded, long_from
from engine_lab.doctor.evidence import Evidence

STATIC = 0.9
"""Of a prompt, common to all, where what differs is put last."""
LEAST_PROMPT = 8


def _share(requests: Sequence[Recorded]) -> list[Recorded]:
    return [replace(each, cached_tokens=round(STATIC * each.prompt_tokens)) for each in requests]


def _stream(requests: Sequence[Recorded]) -> list[Recorded]:
    return [replace(each, stream=True) for each in requests]


def _spread(requests: Sequence[Recorded]) -> list[Recorded]:
    apart_s = requests[-1].at_s / max(1, len(requests) - 1)
    return [replace(each, at_s=number * apart_s) for number, each in enumerate(requests)]


def _without_long(requests: Sequence[Recorded]) -> list[Recorded]:
    limit = long_from([each.prompt_tokens for each in requests])
    return [each for each in requests if each.prompt_tokens < limit]


CHANGES: dict[str, Callable[[Sequence[Recorded]], list[Recorded]]] = {
    "share": _share,
    "stream": _stream,
    "spread": _spread,
    "without_long": _without_long,
}
"""What clients would do otherwise: text that all share comes first, answers are streamed, bursts are spread out, long
prompts go elsewhere."""


def part_of(requests: Sequence[Recorded], most: int) -> list[Recorded]:
    """The last ``most`` of them, by arrival; times count from the first. With it come those that had not ended by then,
    as many at most: without them what waits for rows or memory would find no queue."""
    ordered = sorted(requests, key=lambda each: each.at_s)
    last = ordered[-most:]
    began_s = last[0].at_s if last else 0.0
    there = [each for each in ordered[:-most] if each.at_s + each.e2e_ms / 1e3 > began_s][-most:]
    return [replace(each, at_s=max(0.0, each.at_s - began_s)) for each in (*there, *last)]


def recorded(evidence: Evidence, most: int) -> list[Recorded]:
    """:func:`part_of` its requests. Where none found anything cached, all begin alike for the share of a prompt that
    they had in common: an engine without a prefix cache cannot say it of each."""
    part = part_of(evidence.requests, most)
    if any(each.cached_tokens for each in part):
        return part
    shared = fmean([figures.get("shared_share", 0.0) for figures in evidence.windows])
    return [replace(each, cached_tokens=round(shared * each.prompt_tokens)) for each in part]


class Replay:
    """Sends requests like the recorded ones. Outputs have the recorded length, whatever the model would say."""

    def __init__(self, session: aiohttp.ClientSession, seed: int) -> None:
        self._session, self._seed = session, seed
        self._text = random_text(seed)
        self._model, self._chars_per_token = "", 1.0

    async def send(self, url: str, requests: Sequence[Recorded], salt: str, seed: int) -> list[RequestRecord]:
        """``salt`` and ``seed`` keep prompts out of other runs' prefix cache. Raises
        :class:`~engine_lab.bench.probe.ProbeError` if the server lists no model."""
        if not self._model:
            self._model = await find_model(self._session, url, None)
            sample = Target(url, self._model, "completions")
            found = await calibrate(self._session, sample, self._text)
            self._chars_per_token = found.chars_per_token
        target = Target(url, self._model, "completions", ignore_eos=True, cache_salt=salt)

        async def send(request: BenchRequest, scheduled_s: float) -> RequestRecord:
            like = requests[request.index]
            its = dataclasses.replace(target, stream=like.stream, temperature=like.temperature)
            return await HttpSender(self._session, its, time.perf_counter)(request, scheduled_s)

        return await open_loop(
            send,
            iter(self.prompts(requests, seed)),
            iter([each.at_s for each in requests]),
            Limit(None, None),
            time.perf_counter,
            lambda record: None,
        )

    def prompts(self, requests: Sequence[Recorded], seed: int) -> list[BenchRequest]:
        """They begin alike for as many tokens as were cached."""
        rng, chars = random.Random(f"{self._seed}/{seed}"), self._chars_per_token
        head = self._passage(rng, max(each.prompt_tokens for each in requests))
        made = []
        for number, each in enumerate(requests):
            shared, whole = round(chars * each.cached_tokens), round(chars * max(LEAST_PROMPT, each.prompt_tokens))
            own = f"{rng.getrandbits(40):x} " + self._passage(rng, each.prompt_tokens)
            made.append(BenchRequest(number, (head[:shared] + own)[:whole], max(1, each.output_tokens)))
        return made

    def _passage(self, rng: random.Random, tokens: int) -> str:
        start = rng.randrange(len(self._text) // 2)
        return self._text[start : start + round(self._chars_per_token * max(LEAST_PROMPT, tokens))]
