"""The server of engines: start them behind the listener, watch them, end them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import structlog
from aiohttp import web

from engine.assembly.plan import EnginePlan
from engine.contracts.command import CommandProvider
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router
from engine.http.app import build_app
from engine.http.listener import ABORT_S, Listener, to_stderr
from engine.http.state import STATE, ServerState
from engine.loop.client import EngineClient, EngineDead, EngineRefused
from engine.machine import use
from engine.service import logs
from engine.service.engines import EngineHandle
from engine.service.grammar_worker import GrammarWorker
from engine.service.start_check import check_headers, load_tokenizer
from engine.service.starting import StartReport
from engine.service.tokenizer import Tokenizer
from engine.service.transport import CannotListen, Listen, Transport
from engine.startup.memory.report import describe_start

CLOSE_S = 15.0
"""How long closing may take: more than the engine client takes to kill an engine that does not end
(``CLOSE_TIMEOUT_S`` there)."""

log = structlog.get_logger("engine.server")


class Server(Listener):
    """One listener, and engines of one plan behind it."""

    def __init__(
        self,
        plan: EnginePlan,
        clients: Mapping[str, EngineClient],
        router: Router,
        exporters: Sequence[Exporter],
        tokenizer: Tokenizer,
        finders: Mapping[str, CommandProvider] | None = None,
        grammars: GrammarWorker | None = None,
        *,
        beside: Sequence[Listen] = (),
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        """``clients``: the engines, by id. ``beside``: open other transports to them."""
        super().__init__(plan.settings.server, say)
        self._plan = plan
        self._clients = clients
        self._parts = (router, exporters, tokenizer, finders, grammars)
        self._beside = beside
        self.transports: list[Transport] = []
        """Those beside HTTP, once :meth:`listen` has returned."""

    @property
    def state(self) -> ServerState:
        return self.app[STATE]

    def build(self) -> web.Application:
        return build_app(self._plan, self._clients, *self._parts)

    async def listen(self) -> None:
        """Raises :class:`CannotListen` as well."""
        await super().listen()
        try:
            for opened in self._beside:
                self.transports.append(await opened(self.state))
        except CannotListen:
            await self.close()
            raise

    async def work(self) -> int:
        """Returns 1 when the last engine could not go on, 2 when the configuration cannot run here."""
        try:
            await self._run_engines()
        except EngineRefused as error:
            self._say(f"engine: {error}")
            return 2
        except EngineDead as error:
            self._say(f"error: the engine cannot run: {error}")
        return 1

    @property
    def ready(self) -> str:
        """The line that says so."""
        return f"ready: {self._plan.model.name} at {self.url}/v1"

    def leave(self) -> None:
        self.state.fleet.closing = True

    async def end(self) -> None:
        await self.state.batches.close()
        await asyncio.gather(*[transport.stop(ABORT_S) for transport in self.transports])
        await self.state.fleet.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*[client.close() for client in self._clients.values()])
        except TimeoutError:
            log.error("engine did not end in time")

    async def _run_engines(self) -> None:
        """Until none is left: raises what ended the last one, or kept one from starting."""
        engines = [engine for engine in self.state.engines.values() if engine.state != "stopped"]
        await self.state.engine.tokenizer.warm()
        self._say("starting: " + ("engine process" if len(engines) == 1 else f"{len(engines)} engine processes"))
        before = await asyncio.to_thread(self.state.machine.read)
        try:
            async with asyncio.TaskGroup() as starting:
                for engine in engines:
                    starting.create_task(self._start(engine))
        except* EngineDead as failed:
            raise failed.exceptions[0] from None
        machine = use(before, await asyncio.to_thread(self.state.machine.read))
        if machine.is_busy:
            self._say(f"note: this machine is busy: while it started, the engine spent {machine.words}")
        # What start-up left behind stays for good; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        also = "".join([f", gRPC at {transport.address}" for transport in self.transports])
        self._say(f"{self.ready}{also}")
        await self._keep()

    async def _keep(self) -> None:
        """Restart engines, and have more or fewer of them. Does not return; raises as :meth:`Fleet.watch`."""
        tasks = [asyncio.create_task(work) for work in (self.state.fleet.watch(), self.state.scaler.run())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, engine: EngineHandle) -> None:
        where = f"{engine.id}: " if len(self.state.engines) > 1 else ""

        def say(line: str) -> None:
            self._say(where + line)

        async with StartReport(say) as report:
            await engine.supervisor.start(report.show)
        if engine.client.info is not None:
            say(describe_start(engine.client.info))


S = TypeVar("S", bound=Server)


def serve(plan: EnginePlan, finders: Mapping[str, CommandProvider] | None = None, beside: Sequence[Listen] = ()) -> int:
    """Serve until a signal says otherwise; returns the process's exit code. ``finders``: commands that have findings,
    by the name that calls each. ``beside``: open other transports.

    SIGTERM takes requests for another ``server.lame_duck_s``, then drains for at most ``server.drain_s``; SIGINT drains
    at once; a second signal ends at once. Raises as :func:`make_server`.
    """
    return asyncio.run(make_server(plan, Server, finders, beside=beside).run())


def make_server(
    plan: EnginePlan,
    kind: type[S],
    finders: Mapping[str, CommandProvider] | None = None,
    say: Callable[[str], None] = to_stderr,
    beside: Sequence[Listen] = (),
) -> S:
    """A server with the engines of a plan in processes of their own. Raises
    :class:`engine.assembly.errors.AssemblyError`, before anything is started, for a checkpoint whose headers or
    tokenizer cannot be used.
    """
    from engine.assembly.bind import bind_api
    from engine.startup.process import ProcessEngineClient
    from engine.startup.replicas import devices_of, engine_id, with_memory
    from engine.startup.segments import ServerMemory

    logs.configure()
    check_headers(plan)
    tokenizer = load_tokenizer(plan)
    parts = bind_api(plan)
    plan = with_memory(plan)
    replicas, memory = range(plan.settings.fleet.replicas), ServerMemory(plan)
    clients = {
        engine_id(plan, each): ProcessEngineClient(plan, devices_of(plan, each), memory.of(each)) for each in replicas
    }
    held = parts.router, parts.exporters, tokenizer, finders, GrammarWorker(plan)
    return kind(plan, clients, *held, beside=beside, say=say)
