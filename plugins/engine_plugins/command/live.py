"""A running engine as commands see it: its JSON routes and its metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from engine.machine import MachineTimes, MachineUse, use

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_LONG_ID = re.compile(r"\S*-[0-9a-f]*([0-9a-f]{8}-\d+)\b")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


class LiveError(RuntimeError):
    """The server does not answer as an engine does; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """Of a page in Prometheus' text format 0.0.4. Raises :class:`LiveError` at a line that is none."""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise LiveError(f"/metrics has a line {line[:80]!r}, expected Prometheus' text format")
        name, labels, value = found.groups()
        pairs = _LABEL.findall(labels or "")
        try:
            number = float(value)
        except ValueError:
            raise LiveError(f"/metrics has a line {line[:80]!r}, expected a number at its end") from None
        yield Sample(name, {key: re.sub(r"\\.", _plain, text) for key, text in pairs}, number)


def _plain(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[0], found[0])


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


class LiveEngine:
    """The engine at a URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str | None = None) -> None:
        """``url``: without ``/v1``."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def json(self, path: str) -> Any:
        """What ``GET path`` answers. Raises :class:`LiveError`."""
        try:
            return msgspec.json.decode(await self._get(path))
        except msgspec.DecodeError as error:
            raise LiveError(f"{self.url}{path} answered no JSON: {error}") from error

    async def plan(self) -> Any:
        """What ``/engine/plan`` answers of an engine that is up. Raises :class:`LiveError`."""
        plan = await self.json("/engine/plan")
        if isinstance(plan, dict) and plan.get("engine", plan) is None:
            raise LiveError(f"the engine at {self.url} is not ready yet: wait for its /ready")
        return plan

    async def metrics(self) -> list[Sample]:
        """What ``/metrics`` shows now. Raises :class:`LiveError`."""
        return list(samples((await self._get("/metrics")).decode("utf-8", "replace")))

    async def _get(self, path: str) -> bytes:
        url = self.url + path
        if not url.startswith(("http://", "https://")):
            raise LiveError(f"{self.url}: expected a URL as http://HOST:PORT")
        try:
            async with self._session.get(url, headers=self._headers) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise LiveError(f"{url}: {error or 'timed out'}; is the server running? (--url)") from error
        if response.status == 401:
            raise LiveError(f"{url} wants a key: give --api-key")
        if response.status != 200:
            raise LiveError(f"{url} answered {response.status}: {body[:200].decode('utf-8', 'replace')}")
        return body
