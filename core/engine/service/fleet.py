"""Changes of the engines behind a running listener: drained, restarted one by one, fewer or more of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from engine.contracts.counters import Reading
from engine.loop.client import EngineDead
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError
from engine.service.scaling import engine_readings

POLL_S = 0.05
OTHER_S = 120.0
"""How long a restart waits for another engine to take requests before it gives up."""

Kind = Literal["restart", "resize"]
StepName = Literal["waiting", "draining", "aborting", "restarting", "stopping", "ready", "stopped", "failed"]
log = structlog.get_logger("engine.fleet")


@dataclass(frozen=True, slots=True)
class Step:
    """What a change does to an engine from now on."""

    at_s: float
    """Seconds since the change began."""
    engine: str
    step: StepName
    """``waiting``: for another engine to take requests; ``aborting``: what has not ended in time."""
    sequences: int
    """That the engine has."""
    staying: Mapping[str, int] = field(default_factory=dict)
    """Of these, how many no other engine can go on with, by reason."""


@dataclass(slots=True, eq=False)
class Change:
    """A restart or resize, from its beginning on."""

    number: int
    """Changes of the server are counted from 1 on."""
    kind: Kind
    engines: tuple[str, ...]
    """Those that it is about, in order."""
    steps: list[Step] = field(default_factory=list)
    state: Literal["running", "done", "failed"] = "running"
    error: str = ""
    """Why it failed: what it has not come to is as it was."""
    begun_s: float = field(default_factory=time.monotonic)
    reason: str = "asked for"

    def say(self, engine: EngineHandle, step: StepName) -> None:
        at_s, sequences, staying = time.monotonic() - self.begun_s, len(engine.sendings), engine.staying
        self.steps.append(Step(round(at_s, 3), engine.id, step, sequences, staying))
        more = {"staying": staying} if staying else {}
        log.info("fleet changes", change=self.kind, engine=engine.id, step=step, sequences=sequences, **more)


class Fleet:
    """The engines of a server: keeps each of them up, and changes one at a time. Use on the event loop's thread
    only."""

    def __init__(self, engines: Mapping[str, EngineHandle], drain_s: float, at_start: int | None = None) -> None:
        """``drain_s``: how long what an engine has begun may take before it is ended. ``at_start``: how many are to be
        started with the server, all unless given; the others are stopped."""
        self._engines = engines
        self._drain_s = drain_s
        self._changing: asyncio.Task[None] | None = None
        self.closing = False
        """The server ends: nothing is changed any more."""
        self.change: Change | None = None
        """The latest."""
        self.desired = len(engines) if at_start is None else at_start
        """Engines that should be up."""
        self.reason = "as started"
        """Why so many."""
        self._resized_s = time.monotonic()
        for engine in [*engines.values()][self.desired :]:
            engine.supervisor.state = "stopped"

    async def watch(self) -> None:
        """Restart engines that die or hang, for as long as one is not given up. Raises :class:`EngineDead`, of the last
        one."""
        watching = [asyncio.create_task(self._keep(engine)) for engine in self._engines.values()]
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_EXCEPTION)
            for task in watching:
                if task.done():
                    task.result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def close(self) -> None:
        """End a change where it is; there are no further ones."""
        self.closing = True
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)

    def drain(self, engine: EngineHandle, *, force: bool = False) -> None:
        """Give an engine no more requests; what it has goes on at others. Raises :class:`ApiError` ``conflict``
        where no other takes any, unless ``force``."""
        self._check()
        if not force:
            self._check_others([engine])
        engine.drain()

    def undrain(self, engine: EngineHandle) -> None:
        """Give it requests again. Raises :class:`ApiError` ``conflict``."""
        self._check()
        engine.draining = False

    def restart(self, engines: Sequence[EngineHandle], *, force: bool = False) -> Change:
        """Restart engines, one at a time: each is drained, ended and started again before the next one is touched. One
        that was drained stays so, one that was stopped stays so unless it is the only one asked for. Returns at once.
        Raises :class:`ApiError` ``conflict`` where no other engine takes requests meanwhile, unless ``force``."""
        self._check()
        if len(engines) > 1:
            engines = [engine for engine in engines if engine.state != "stopped"]
        if not force:
            self._check_others(engines)
        return self._begin("restart", engines, self._restart_each(engines, force))

    def resize(self, replicas: int) -> Change:
        """Have the first ``replicas`` engines up, and the others stopped: the highest are drained and ended first.
        Returns at once. Raises :class:`ApiError`."""
        self._check()
        engines = list(self._engines.values())
        if replicas > len(engines):
            raise ApiError(
                "invalid",
                f"replicas={replicas}: this server has memory and devices for {len(engines)} engines; start it with "
                f"fleet.replicas={replicas}.",
                param="replicas",
            )
        if replicas < 1:
            raise ApiError("invalid", f"replicas={replicas}: expected at least 1.", param="replicas")
        more = [engine for engine in engines[:replicas] if engine.state == "stopped"]
        fewer = [engine for engine in reversed(engines[replicas:]) if engine.state != "stopped"]
        return self._begin_resize(replicas, more, fewer, "asked for")

    def scale(self, desired: int, reason: str) -> Change:
        """As :meth:`resize`, to 0 as well: those go first that :func:`may_go` names first. Raises :class:`ApiError`
        ``conflict`` while another change runs."""
        self._check()
        up, stopped = may_go(self._engines.values()), [e for e in self._engines.values() if e.state == "stopped"]
        more, fewer = stopped[: max(0, desired - len(up))], up[: max(0, len(up) - desired)]
        return self._begin_resize(desired, more, fewer, reason)

    def readings(self, engine: EngineHandle) -> list[Reading]:
        """What is counted of an engine, and how it is now. Call on the thread of the event bus."""
        is_first = engine is next(iter(self._engines.values()))
        return [*engine.counters.readings(), *engine_readings(engine, self.desired if is_first else None)]

    @property
    def is_changing(self) -> bool:
        return self.change is not None and self.change.state == "running"

    @property
    def changed_s_ago(self) -> float:
        """Since :attr:`desired` was set."""
        return time.monotonic() - self._resized_s

    def _begin_resize(
        self, desired: int, more: Sequence[EngineHandle], fewer: Sequence[EngineHandle], reason: str
    ) -> Change:
        self.desired, self.reason, self._resized_s = desired, reason, time.monotonic()
        return self._begin("resize", [*more, *fewer], self._resize(desired, more, fewer), reason)

    def _begin(
        self, kind: Kind, engines: Sequence[EngineHandle], work: Coroutine[Any, Any, None], reason: str = "asked for"
    ) -> Change:
        number = 1 if self.change is None else self.change.number + 1
        self.change = Change(number, kind, tuple([engine.id for engine in engines]), reason=reason)
        self._changing = asyncio.create_task(self._run(self.change, work))
        return self.change

    async def _run(self, change: Change, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            change.state = "done"
        except _Unfinished as error:
            change.error = str(error)
            log.error("fleet did not change", change=change.kind, cause=str(error))
        finally:
            if change.state == "running":
                change.state = "failed"

    async def _restart_each(self, engines: Sequence[EngineHandle], force: bool) -> None:
        for engine in engines:
            if not force:
                await self._other_than(engine)
            before = engine.draining
            try:
                await self._emptied(engine)
                await self._started(engine)
            finally:
                engine.draining = before

    async def _resize(self, desired: int, more: Sequence[EngineHandle], fewer: Sequence[EngineHandle]) -> None:
        for engine in more:
            await self._started(engine)
        for engine in fewer:
            try:
                if desired:
                    await self._other_than(engine)
                await self._emptied(engine)
                self._say(engine, "stopping")
                await engine.supervisor.stop()
            finally:
                engine.draining = False
            self._say(engine, "stopped")

    async def _other_than(self, engine: EngineHandle) -> None:
        """Wait until another engine takes requests. Raises :class:`_Unfinished`."""
        if self._is_spared(engine):
            return
        self._say(engine, "waiting")
        try:
            async with asyncio.timeout(OTHER_S):
                while not self._is_spared(engine):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise _Unfinished(f"{engine.id} is as it was: no other engine took requests for {OTHER_S:.0f} s") from None

    async def _emptied(self, engine: EngineHandle) -> None:
        """Wait until an engine has nothing left, at most as long as what it has begun may take."""
        engine.drain()
        self._say(engine, "draining")
        try:
            async with asyncio.timeout(self._drain_s):
                while engine.sendings:
                    await asyncio.sleep(POLL_S)
                    engine.drain()  # another one may be back
        except TimeoutError:
            self._say(engine, "aborting")
        if self.closing:
            raise _Unfinished(f"{engine.id} was not restarted: the server is shutting down")

    async def _started(self, engine: EngineHandle) -> None:
        self._say(engine, "restarting")
        try:
            await engine.supervisor.restart()
        except EngineDead as dead:
            self._say(engine, "failed")
            raise _Unfinished(f"{engine.id} did not start: {dead}") from None
        self._say(engine, "ready")

    def _say(self, engine: EngineHandle, step: StepName) -> None:
        assert self.change is not None
        self.change.say(engine, step)

    async def _keep(self, engine: EngineHandle) -> None:
        while True:
            try:
                await engine.supervisor.watch()
            except EngineDead as dead:  # others serve on, while there are any
                if all(each.state in ("failed", "stopped") for each in self._engines.values()):
                    raise
                log.error("an engine has given up, others serve on", engine=engine.id, cause=str(dead))

    def _check(self) -> None:
        if self.closing:
            raise ApiError("unavailable", "The server is shutting down.", code="draining", retry_after_s=5)
        if any(engine.state == "loading" for engine in self._engines.values()):
            raise ApiError("conflict", "The server is still starting; ask again when /ready is 200.")
        if self.change is not None and self.is_changing:
            raise ApiError("conflict", f"A {self.change.kind} is running; GET /engine/fleet says how far it is.")

    def _check_others(self, engines: Sequence[EngineHandle]) -> None:
        """Raises :class:`ApiError` where one of ``engines`` takes requests, and no other engine would meanwhile."""
        needed = [engine for engine in engines if not self._is_spared(engine)]
        if needed:
            raise ApiError(
                "conflict",
                f"{needed[0].id} is the only engine that takes requests: every request would be refused meanwhile. "
                "--force (force=1) does so all the same.",
                code="only_engine",
            )

    def _is_spared(self, engine: EngineHandle) -> bool:
        """Whether it takes no requests, or another one does."""
        return not engine.takes_requests or any(
            other.takes_requests for other in self._engines.values() if other is not engine
        )


def may_go(engines: Iterable[EngineHandle]) -> list[EngineHandle]:
    """Those that are not stopped, in the order in which they are missed least: first which take no requests, then by
    what they have in flight, then by what they have cached; of equal ones the last first."""

    def missed(engine: EngineHandle) -> tuple[bool, int, int]:
        return engine.takes_requests, engine.load.sequences, engine.cached_blocks

    return sorted((engine for engine in reversed([*engines]) if engine.state != "stopped"), key=missed)


class _Unfinished(Exception):
    """Why a change ended early."""
