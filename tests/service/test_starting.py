"""A start is never silent for long, and says how far it is."""

from __future__ import annotations

import asyncio

from engine.loop.messages import Progress
from engine.service.starting import StartReport


class Start:
    """A report with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.report = StartReport(self.lines.append, every_s=2.0, clock=lambda: self.now)

    def at(self, now: float, progress: Progress | None = None) -> list[str]:
        """What is said at a moment, on a message or without one."""
        self.now, before = now, len(self.lines)
        self.report.remind() if progress is None else self.report.show(progress)
        return self.lines[before:]


def test_a_phase_is_named_when_it_begins_and_short_ones_say_no_more() -> None:
    start = Start()
    assert start.at(100.0, Progress("bind plugins", 0.0)) == ["starting: bind plugins"]
    assert start.at(100.5, Progress("bind plugins", 1.0)) == []
    assert start.at(101.0, Progress("load weights", 0.0)) == ["starting: load weights"]


def test_a_phase_that_reports_nothing_still_shows_its_seconds() -> None:
    start = Start()
    start.at(100.0, Progress("build kernels", 0.0))
    assert start.at(101.9) == []
    assert start.at(102.1) == ["starting: build kernels, 2 s"]
    assert start.at(103.0) == []
    assert start.at(104.2) == ["starting: build kernels, 4 s"]


def test_a_long_phase_shows_its_share_every_two_seconds_not_with_every_message() -> None:
    start = Start()
    start.at(100.0, Progress("load weights", 0.0))
    assert start.at(101.0, Progress("load weights", 0.1, "layer 1/10")) == []
    assert start.at(102.5, Progress("load weights", 0.25, "layer 2/10")) == [
        "starting: load weights 25% (layer 2/10), 2 s"
    ]
    assert start.at(103.0, Progress("load weights", 0.3, "layer 3/10")) == []


def test_nothing_is_said_between_phases() -> None:
    start = Start()
    start.at(100.0, Progress("load weights", 0.0))
    start.at(101.0, Progress("load weights", 1.0))
    assert start.at(110.0) == []


def test_a_silent_engine_is_reminded_of_by_itself() -> None:
    said = asyncio.Event()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) > 1:
            said.set()

    async def scenario() -> None:
        async with StartReport(say, every_s=0.01) as report:
            report.show(Progress("warm up", 0.0))
            await asyncio.wait_for(said.wait(), 10)

    asyncio.run(scenario())
    assert lines[1].startswith("starting: warm up, ")
