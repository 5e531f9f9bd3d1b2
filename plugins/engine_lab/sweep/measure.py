"""Starts the engine of a set, sends it the load, and ends it."""

from __future__ import annotations

import time

import aiohttp

from engine.contracts.percentiles import describe
from engine_lab.bench.probe import ProbeError, find_model
from engine_lab.bench.record import RequestRecord
from engine_lab.shared.live import LiveEngine, LiveError
from engine_lab.shared.servers import Key, Refused, Servers, facts_of
from engine_lab.sweep.figures import figures_of
from engine_lab.sweep.load import Requests
from engine_lab.sweep.options import SweepOptions
from engine_lab.sweep.record import Candidate, Experiment, Round, Run


class Measure:
    """Makes one run at a time. Two processes of equal engines differ for as long as they live, if only by where their
    memory lies: every run has a process of its own, unless they shall stay."""

    def __init__(
        self, session: aiohttp.ClientSession, servers: Servers, options: SweepOptions, experiment: Experiment
    ) -> None:
        """Raises ``ValueError`` if there is no text to cut prompts from."""
        self._session, self._servers, self._options, self._experiment = session, servers, options, experiment
        self._requests = Requests(session, options.load)

    async def __call__(self, which: int, number: int, asked: Round) -> Run:
        started = time.monotonic()
        candidate = self._experiment.candidates[which]
        figures: dict[str, float | None] = {}
        failed, lag = "", None
        try:
            url = await self._url(candidate, asked)
            records, lags_s = await self._send(url, candidate, number, asked.scale)
            if not (failed := _failure(records)):
                figures = figures_of(records, lags_s, self._options.slo, self._options.load.class_slos)
                lag = describe([(late * 1e3, 1) for late in lags_s])["p99"]
                if figures[self._options.by] is None:
                    failed = f"too few of its requests have {self._options.by}: more --requests, or a longer --duration"
        except Refused as error:
            failed = f"it does not start: {_last(str(error))}"
        except (ProbeError, LiveError) as error:
            failed = str(error)
        return Run(which, number, figures, time.monotonic() - started, failed, lag)

    async def _url(self, candidate: Candidate, asked: Round) -> str:
        mine: Key = (candidate.words, candidate.id)
        if not self._options.resident:
            await self._servers.close()
            return (await self._servers.keep([mine]))[0]
        able = [self._experiment.candidates[one] for one in asked.candidates]
        others = [(one.words, one.id) for one in able if one.facts and not one.refused and one is not candidate]
        return (await self._servers.keep([mine, *others]))[0]

    async def _send(
        self, url: str, candidate: Candidate, number: int, scale: float
    ) -> tuple[list[RequestRecord], list[float]]:
        experiment = self._experiment
        model = await find_model(self._session, url, None)
        if not candidate.facts:
            answer = await LiveEngine(self._session, url).json("/engine/plan")
            candidate.facts = facts_of(answer)
            experiment.model, experiment.device = model, answer["plan"]["device"]["name"]
        if experiment.chars_per_token is None:
            experiment.chars_per_token = await self._requests.chars_per_token(url, model)
        return await self._requests.send(url, model, experiment.chars_per_token, number, scale)


def _failure(records: list[RequestRecord]) -> str:
    failed = [record for record in records if record.error]
    if not failed:
        return ""
    return f"{len(failed)} of {len(records)} requests failed: {failed[0].error}: {failed[0].detail}"


def _last(said: str) -> str:
    """Of what an engine printed before it ended."""
    return said.splitlines()[-1] if said else "it said nothing"
