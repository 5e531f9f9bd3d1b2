"""``engine doctor --verify``: a finding's override, or what its advice comes to, on a shadow engine in pairs of runs
beside one without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engine_lab.bench.probe import ProbeError, calibrate, find_model
from engine_lab.bench.target import Target, open_session
from engine_lab.doctor.classes import P95s, Recorded, harmed, long_from, p95s
from engine_lab.doctor.diagnosis import Finding
from engine_lab.doctor.evidence import Engine, Evidence, engine_of
from engine_lab.doctor.figures import machine_of
from engine_lab.doctor.recording import Window, reading, watch
from engine_lab.doctor.replay import CHANGES, Replay, recorded
from engine_lab.doctor.shadow import form_of, overrides_of
from engine_lab.ladder.options import LadderOptions
from engine_lab.ladder.record import Ladder
from engine_lab.ladder.requests import Requests
from engine_lab.shared.live import LiveEngine
from engine_lab.shared.pairs import before_first
from engine_lab.shared.servers import Servers
from engine_lab.shared.statistics import Estimate, paired_ratio

LOOK_S = 0.1
MOST = 60
"""Recorded requests that a run replays."""
WARM = 8


@dataclass(frozen=True, slots=True)
class Verified:
    """The finding's metric with the change / without, and what each class of requests got."""

    ratio: Estimate
    before: P95s
    after: P95s
    busy: tuple[int, int] = (0, 0)
    """Runs beside which others had the cores, and all runs."""

    @property
    def paid(self) -> list[str]:
        """Who waits longer for it."""
        return list(harmed(self.before, self.after))


async def verify(
    finding: Finding, evidence: Evidence, options: LadderOptions, say: Callable[[str], None], *, replayed: bool
) -> Verified:
    """``replayed``: the recorded requests are sent, else those of ``options``. Raises ``Refused``, ``ProbeError`` and
    ``LiveError``, and ``ValueError`` where a run lacks the metric, and of one of several engines: the shadow would have
    the whole machine."""
    if (replicas := evidence.engine.replicas) > 1:
        raise ValueError(
            f"--verify: the engine shared its machine with {replicas - 1} others (fleet.replicas={replicas}), and its "
            "shadow would have it alone: put the override to the test on a server with one engine"
        )
    before, after = (overrides_of(evidence.engine, changes) for changes in ((), finding.remedy.overrides))
    order = before_first(f"{options.seed}/{finding.rule.cause}", options.pairs)
    values: tuple[list[float], list[float]] = ([], [])
    requests: tuple[list[Recorded], list[Recorded]] = ([], [])
    busy = 0
    with tempfile.TemporaryDirectory(prefix="engine-doctor-") as logs:
        async with open_session(options.timeout_s) as session:
            servers = Servers(session, options.config_dirs, Path(logs))
            load = Recording(session, evidence, finding, options) if replayed else Stated(session, evidence, options)
            shadow = Shadow(session, servers, evidence, load, finding.rule.metric)
            try:
                for pair, is_before_first in enumerate(order):
                    say(f"{finding.rule.cause}: pair {pair + 1} of {options.pairs}")
                    await servers.close()
                    for side in (0, 1) if is_before_first else (1, 0):
                        words = before if side == 0 else after
                        watched = await shadow.measured(words, pair, changed=side == 1)
                        values[side].append(watched.figures[finding.rule.metric])
                        requests[side].extend(watched.requests_since(0.0))
                        busy += machine_of(watched.figures).is_busy
            finally:
                await servers.close()
    limit = long_from([each.prompt_tokens for each in requests[0]])
    without, changed = (p95s(each, limit) for each in requests)
    return Verified(paired_ratio(*values, options.level), without, changed, (busy, 2 * len(order)))


class Recording:
    """The load of the evidence, and, changed, what it would be if clients took the advice."""

    def __init__(
        self, session: aiohttp.ClientSession, evidence: Evidence, finding: Finding, options: LadderOptions
    ) -> None:
        self._replay, self._seed = Replay(session, options.seed), options.seed
        sent = recorded(evidence, MOST)
        tried = "" if finding.remedy.overrides else finding.remedy.change
        change = CHANGES.get(tried, list)
        self._sides = sent, change(sent)

    async def warm(self, url: str) -> None:
        await self._replay.send(url, self._sides[0][:WARM], "warm-up", self._seed)

    async def send(self, url: str, pair: int, *, changed: bool) -> None:
        records = await self._replay.send(url, self._sides[changed], "measured", self._seed + 1 + pair)
        if not any(record.ok for record in records):
            raise ProbeError(f"{url}: every request of a run failed, the first with: {records[0].detail}")


class Stated:
    """A load by flags of ``engine ladder``."""

    def __init__(self, session: aiohttp.ClientSession, evidence: Evidence, options: LadderOptions) -> None:
        self._session, self._options, self._form = session, options, form_of(evidence)
        self._ladder = Ladder((), [], {})
        self._requests = Requests(session, options, self._ladder)

    async def warm(self, url: str) -> None:
        options = self._options
        if not self._ladder.model:
            self._ladder.model = await find_model(self._session, url, None)
            target = Target(url, self._ladder.model, options.endpoint)
            found = await calibrate(self._session, target, self._requests.text)
            self._ladder.chars_per_token = found.chars_per_token
        await self._requests.run(url, self._form, options.seed, "warm-up")

    async def send(self, url: str, pair: int, *, changed: bool) -> None:
        await self._requests.run(url, self._form, self._options.seed + 1 + pair, "measured")


class Shadow:
    """Engines started anew for each run, one at a time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Servers,
        evidence: Evidence,
        load: Recording | Stated,
        metric: str,
    ) -> None:
        self._session, self._servers, self._load, self._metric = session, servers, load, metric
        self._recorded, self._is_checked = evidence.engine, False

    async def measured(self, words: tuple[str, ...], pair: int, *, changed: bool) -> Window:
        """One run; its figures have the metric."""
        (url,) = await self._servers.keep([(words, 0)])
        engine = LiveEngine(self._session, url)
        if not self._is_checked:
            self._check(engine_of(await engine.json("/engine/plan")))
        await self._load.warm(url)
        before = await reading(engine)
        watched = await watch(engine, before, self._load.send(url, pair, changed=changed), LOOK_S)
        if self._metric not in watched.figures:
            raise ValueError(f"a run says nothing of {self._metric}: ask for more requests (--workload)")
        return watched

    def _check(self, shadow: Engine) -> None:
        """Raises ``ValueError`` if the shadow runs on another device than the engine."""
        if shadow.device != self._recorded.device:
            raise ValueError(
                f"--verify: the engine runs on {self._recorded.device}, and its shadow would run here, on "
                f"{shadow.device}: run engine doctor --verify on the engine's machine"
            )
        self._is_checked = True
