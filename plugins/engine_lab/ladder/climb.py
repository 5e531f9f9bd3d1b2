"""Starts engines, asks each what it is, and makes the runs of every comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import aiohttp

from engine_lab.bench.probe import ProbeError, calibrate, find_model
from engine_lab.bench.target import open_session
from engine_lab.ladder.comparisons import Comparison, plan
from engine_lab.ladder.floor import machine
from engine_lab.ladder.options import LadderOptions
from engine_lab.ladder.record import Ladder, Measured, Run, Survey
from engine_lab.ladder.requests import Requests
from engine_lab.ladder.rungs import P99, Rung, Words, form_of, merged, overrides_of
from engine_lab.ladder.survey import baseline_of, outputs_of
from engine_lab.shared.live import LiveEngine
from engine_lab.shared.servers import Key, Refused, Servers, facts_of


class Climb:
    """Makes what is missing of a ladder."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Servers,
        options: LadderOptions,
        ladder: Ladder,
        saved: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """``saved`` is called after every step that need not be made again, ``say`` with what is being done."""
        self._session, self._servers, self._options, self._ladder = session, servers, options, ladder
        self._saved, self._say = saved, say
        self._requests = Requests(session, options, ladder)

    async def all(self) -> None:
        """Raises :class:`Refused` if the baseline does not start; ``ProbeError``, ``LiveError`` and ``RuntimeError``
        where an engine or the machine cannot be asked."""
        ladder, options = self._ladder, self._options
        await self._survey_rungs()
        rungs = started_rungs(ladder)
        done = {measured.comparison: measured for measured in ladder.comparisons}
        for comparison in plan(ladder.base, rungs, options.leave_one_out, options.same):
            if comparison not in done:
                done[comparison] = Measured(comparison.kind, comparison.name, comparison.before, comparison.after)
                ladder.comparisons.append(done[comparison])
            await self._measure(done[comparison])

    async def _survey_rungs(self) -> None:
        ladder = self._ladder
        known = {survey.rung: survey for survey in ladder.surveys}
        words = ladder.base
        for rung in (Rung("", ()), *ladder.rungs):
            if rung.name not in known:
                known[rung.name] = await self._survey(rung, merged(words, rung.words))
                ladder.surveys.append(known[rung.name])
                self._saved()
            if not known[rung.name].refused:
                words = known[rung.name].words

    async def _survey(self, rung: Rung, words: Words) -> Survey:
        """Raises :class:`Refused` of the baseline alone."""
        self._say(f"starting the engine of {rung.name or 'the baseline'}")
        survey, options = Survey(rung.name, words), self._options
        try:
            (url,) = await self._servers.keep([(overrides_of(words), 0)])
        except Refused as error:
            if not rung.name:
                raise
            survey.refused = str(error)
            return survey
        if not rung.name:
            await self._observe(url, words)
        form = form_of(words)
        survey.outputs = await outputs_of(self._session, self._requests, url, form, options.seed, options.outputs)
        survey.facts = facts_of(await LiveEngine(self._session, url).json("/engine/plan"))
        return survey

    async def _observe(self, url: str, words: Words) -> None:
        """What the baseline has to say for all: its model, how long its tokens are, and how long its answers."""
        ladder, options = self._ladder, self._options
        ladder.model = await find_model(self._session, url, None)
        ladder.engine = baseline_of(await LiveEngine(self._session, url).json("/engine/plan"))
        if options.floor and ladder.engine.kind == "cpu":
            self._say("measuring the machine")
            ladder.floor = await machine()
        if options.prompt_ids is None:
            target = self._requests.target(url, form_of(words), "calibration")
            calibration = await calibrate(self._session, target, self._requests.text)
            ladder.chars_per_token = calibration.chars_per_token
        if any(form_of(words).max_tokens == P99 for words in (ladder.base, *(rung.words for rung in ladder.rungs))):
            self._say(f"observing the length of {options.observe} answers")
            records, _ = await self._requests.send(url, form_of(words), options.seed, "observed", options.observe)
            ladder.output_lengths = [record.output_tokens for record in records if record.output_tokens]
            if not ladder.output_lengths:
                raise ProbeError(f"{url}: no answer to observe, the first failed with: {records[0].detail}")

    async def _measure(self, measured: Measured) -> None:
        options, comparison = self._options, measured.comparison
        if measured.refused or len(measured.pairs) == options.pairs:
            return
        keys = [(overrides_of(words), 0) for words in (comparison.before, comparison.after)]
        if comparison.is_same:
            keys[1] = (keys[1][0], 1)
        order = comparison.order(options.seed, options.pairs)
        try:
            for pair in range(len(measured.pairs), options.pairs):
                self._say(f"{comparison.kind}: {comparison.name}, pair {pair + 1} of {options.pairs}")
                measured.pairs.append(await self._pair(comparison, keys, pair, order[pair]))
                self._saved()
        except Refused as error:
            measured.refused = str(error)
            self._saved()

    async def _pair(self, comparison: Comparison, keys: list[Key], pair: int, is_before_first: bool) -> tuple[Run, Run]:
        """One run of each side. Two processes of equal engines differ for as long as they live, if only by where their
        memory lies: for every pair both are started anew, unless they shall stay."""
        options, forms = self._options, (form_of(comparison.before), form_of(comparison.after))
        sides = (0, 1) if is_before_first else (1, 0)
        if keys[0] != keys[1] and not options.resident:
            await self._servers.close()
        known = self._servers.running()
        urls = dict(zip(sides, await self._servers.keep([keys[side] for side in sides])))
        if known != self._servers.running() or pair == 0:
            for side in sides:
                await self._requests.run(urls[side], forms[side], options.seed, "warm-up")
        runs = {}
        for side in sides:
            salt = f"{comparison.kind}/{comparison.name}/{pair}/{side}"[-256:]
            runs[side] = await self._requests.run(urls[side], forms[side], options.seed + 1 + pair, salt)
        return runs[0], runs[1]


def started_rungs(ladder: Ladder) -> list[Rung]:
    """Those that the engine started with."""
    refused = {survey.rung for survey in ladder.surveys if survey.refused}
    return [rung for rung in ladder.rungs if rung.name not in refused]


async def climb(options: LadderOptions, ladder: Ladder, saved: Callable[[], None], say: Callable[[str], None]) -> None:
    """Make what is missing of ``ladder``, with engines that are stopped however it ends."""
    with tempfile.TemporaryDirectory(prefix="engine-ladder-") as logs:
        async with open_session(options.timeout_s) as session:
            servers = Servers(session, options.config_dirs, Path(logs))
            try:
                await Climb(session, servers, options, ladder, saved, say).all()
            finally:
                await servers.close()
