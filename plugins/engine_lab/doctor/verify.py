"""``engine doctor --verify``: a finding's override on a shadow engine, in pairs of runs beside one without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import aiohttp

from engine_lab.bench.probe import calibrate, find_model
from engine_lab.bench.target import Target, open_session
from engine_lab.doctor.diagnosis import Finding
from engine_lab.doctor.evidence import Engine, Evidence, engine_of
from engine_lab.doctor.recording import reading, watch
from engine_lab.doctor.shadow import form_of, overrides_of
from engine_lab.ladder.comparisons import ADDED, Comparison, before_first
from engine_lab.ladder.options import LadderOptions
from engine_lab.ladder.record import Ladder
from engine_lab.ladder.requests import Requests
from engine_lab.ladder.servers import Servers
from engine_lab.shared.live import LiveEngine
from engine_lab.shared.statistics import Estimate, paired_ratio

LOOK_S = 0.1
SAMPLE_CHARS = 4000


async def verify(finding: Finding, evidence: Evidence, options: LadderOptions, say: Callable[[str], None]) -> Estimate:
    """The finding's metric with its overrides / without. Raises ``Refused``, ``ProbeError`` and ``LiveError``, and
    ``ValueError`` where a run lacks the metric, and of one of several engines: the shadow would have the whole machine.
    """
    if (replicas := evidence.engine.replicas) > 1:
        raise ValueError(
            f"--verify: the engine shared its machine with {replicas - 1} others (fleet.replicas={replicas}), and its "
            "shadow would have it alone: put the override to the test on a server with one engine"
        )
    before, after = (overrides_of(evidence.engine, changes) for changes in ((), finding.remedy.overrides))
    comparison = Comparison(ADDED, finding.rule.cause, before, after)
    order = before_first(options.seed, comparison, options.pairs)
    values: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="engine-doctor-") as logs:
        async with open_session(options.timeout_s) as session:
            servers = Servers(session, options.config_dirs, Path(logs))
            shadow = Shadow(session, servers, evidence, options, finding.rule.metric)
            try:
                for pair, is_before_first in enumerate(order):
                    say(f"{finding.rule.cause}: pair {pair + 1} of {options.pairs}")
                    await servers.close()
                    for side in (0, 1) if is_before_first else (1, 0):
                        words = comparison.before if side == 0 else comparison.after
                        values[side].append(await shadow.measured(words, pair))
            finally:
                await servers.close()
    return paired_ratio(*values, options.level)


class Shadow:
    """Engines started anew for each run, one at a time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Servers,
        evidence: Evidence,
        options: LadderOptions,
        metric: str,
    ) -> None:
        self._session, self._servers, self._options, self._metric = session, servers, options, metric
        self._evidence, self._form = evidence, form_of(evidence)
        self._ladder = Ladder((), [], {})
        self._requests = Requests(session, options, self._ladder)

    async def measured(self, words: tuple[str, ...], pair: int) -> float:
        """The metric of one run, in ms."""
        options = self._options
        (url,) = await self._servers.keep([(words, 0)])
        if not self._ladder.model:
            self._check(engine_of(await LiveEngine(self._session, url).json("/engine/plan")))
            self._ladder.model = await find_model(self._session, url, None)
            target = Target(url, self._ladder.model, options.endpoint)
            found = await calibrate(self._session, target, self._requests.text[:SAMPLE_CHARS], None)
            self._ladder.chars_per_token = found.chars_per_token
        await self._requests.run(url, self._form, options.seed, "warm-up")
        engine = LiveEngine(self._session, url)
        before = await reading(engine)
        run = self._requests.run(url, self._form, options.seed + 1 + pair, "measured")
        figures, _ = await watch(engine, before, run, LOOK_S)
        if self._metric not in figures:
            raise ValueError(f"a run of {options.requests} requests says nothing of {self._metric}: ask for more")
        return figures[self._metric]

    def _check(self, shadow: Engine) -> None:
        """Raises ``ValueError`` if the shadow runs on another device than the engine."""
        recorded = self._evidence.engine
        if shadow.device != recorded.device:
            raise ValueError(
                f"--verify: the engine runs on {recorded.device}, and its shadow would run here, on {shadow.device}: "
                "run engine doctor --verify on the engine's machine"
            )
