"""A running engine as commands see it: its JSON routes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from engine.contracts.counters import Reading
from engine.contracts.findings import EngineReader
from engine.machine import MachineTimes, MachineUse, use

_LONG_ID = re.compile(r"\S*-[0-9a-f]*([0-9a-f]{8}-\d+)\b")


class LiveError(ValueError):
    """The server does not answer as an engine does; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


def samples_of(readings: Iterable[Reading]) -> Iterator[Sample]:
    """As Prometheus has them: a histogram is cumulative counts by ``le``, a sum and a count."""
    for reading in readings:
        if reading.kind != "histogram":
            for value, amount in reading.values.items():
                yield Sample(reading.name, {reading.label: value} if reading.label else {}, amount)
            continue
        below = 0
        for bound, count in zip((*reading.bounds, math.inf), reading.counts, strict=True):
            below += count
            yield Sample(f"{reading.name}_bucket", {"le": bound_text(bound)}, below)
        yield Sample(f"{reading.name}_sum", {}, reading.sum)
        yield Sample(f"{reading.name}_count", {}, below)


def by_engine(readings: Iterable[Reading]) -> dict[str, list[Reading]]:
    """The readings of each engine, by its id."""
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        found.setdefault(reading.engine, []).append(reading)
    return found


def bound_text(bound: float) -> str:
    """``le`` of a bucket, as pages for Prometheus have it."""
    return "+Inf" if math.isinf(bound) else f"{bound:.1f}" if bound == int(bound) else repr(bound)


def quantile(share: float, buckets: dict[float, float]) -> float:
    """Of a histogram's cumulative counts by upper bound, by linear interpolation within a bucket, as Prometheus'
    ``histogram_quantile`` has it. NaN without observations; the last finite bound beyond it."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total > 0.0:
        return math.nan
    rank, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return low
            inside = buckets[bound] - below
            return low + (bound - low) * ((rank - below) / inside if inside > 0.0 else 1.0)
        low, below = bound, buckets[bound]
    return low


def machine_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> MachineUse | None:
    """Of two answers of ``/engine/stats``; ``None`` where one has nothing of the machine."""
    known = [msgspec.convert(found, MachineTimes) for each in (before, after) if (found := each.get("machine"))]
    return use(*known) if len(known) == 2 else None


def short_ids(text: str) -> str:
    """With the ids of requests that the engine made up by their ends."""
    return _LONG_ID.sub(r"\1", text)


def readings_in(answer: Any) -> list[Reading]:
    """Of what ``/engine/counters`` answers. Raises :class:`LiveError`."""
    try:
        return msgspec.convert(answer["metrics"], list[Reading])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise LiveError(f"/engine/counters answered something else than counters: {error}") from error


async def plan_of(engine: EngineReader) -> Any:
    """What ``/engine/plan`` answers of an engine that is up. Raises ``ValueError``."""
    plan = await engine.json("/engine/plan")
    if isinstance(plan, dict) and plan.get("engine", plan) is None:
        raise LiveError("the engine is not ready yet: wait for its /ready")
    return plan


async def metrics_of(engine: EngineReader) -> list[Sample]:
    """What ``/engine/counters`` shows now. Raises ``ValueError``."""
    return list(samples_of(readings_in(await engine.json("/engine/counters"))))


class LiveEngine:
    """An engine at a URL: an :class:`~engine.contracts.findings.EngineReader`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api_key: str | None = None, engine: str | None = None
    ) -> None:
        """``url``: without ``/v1``. ``engine``: its id, ``None``: what the server says of its first one, or of all."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.engine = engine
        self._session, self._api_key = session, api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def of(self, engine: str) -> LiveEngine:
        """Another engine of the same server."""
        return LiveEngine(self._session, self.url, self._api_key, engine)

    async def fleet(self) -> dict[str, dict[str, Any]]:
        """What ``/engine/fleet`` says of each of the server's engines, by id, the first one first. Raises
        :class:`LiveError`."""
        answer = await self.json("/engine/fleet")
        try:
            return {str(each["id"]): each for each in answer["engines"]}
        except (KeyError, TypeError) as error:
            raise LiveError(f"{self.url}/engine/fleet lacks {error}: expected an engine of this version") from error

    async def chosen(self, engine: str | None) -> tuple[LiveEngine, str]:
        """The engine with this id, ``None``: the first one; and a line that says so where it has others beside it,
        else an empty one. Raises :class:`LiveError`."""
        names = list(await self.fleet())
        if engine is not None and engine not in names:
            raise LiveError(f"{self.url} has no engine {engine!r}; it has {', '.join(names)} (--engine)")
        mine = names[0] if engine is None else engine
        others = [name for name in names if name != mine]
        said = f"{mine} is one of {len(names)} engines; --engine chooses another: {', '.join(others)}" if others else ""
        return self.of(mine), said

    async def json(self, path: str) -> Any:
        """What ``GET path`` answers. Raises :class:`LiveError`."""
        if self.engine is not None:
            path += f"{'&' if '?' in path else '?'}engine={quote(self.engine, safe='')}"
        return await self._json("GET", path)

    async def post(self, path: str) -> Any:
        """What ``POST path``, without a body, answers. Raises :class:`LiveError`."""
        return await self._json("POST", path)

    async def _json(self, method: str, path: str) -> Any:
        try:
            return msgspec.json.decode(await self._ask(method, path))
        except (msgspec.DecodeError, RecursionError) as error:
            raise LiveError(f"{self.url}{path} answered no JSON: {error}") from error

    async def _ask(self, method: str, path: str) -> bytes:
        url = self.url + path
        if not url.startswith(("http://", "https://")):
            raise LiveError(f"{self.url}: expected a URL as http://HOST:PORT")
        try:
            async with self._session.request(method, url, headers=self._headers) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise LiveError(f"{url}: {error or 'timed out'}; is the server running?") from error
        if response.status == 401:
            raise LiveError(f"{url} wants a key: give --api-key")
        if response.status not in (200, 202):
            raise LiveError(f"{url} answered {response.status}: {_message(body)}")
        return body


def _message(body: bytes) -> str:
    """Of an error that a server answered, or the beginning of whatever it was."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
