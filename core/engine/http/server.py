"""The serving process from start to end: listen, start the engine, watch it, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

import structlog
from aiohttp import web

from engine.assembly.plan import EnginePlan
from engine.contracts.command import CommandProvider
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router
from engine.http.app import build_app
from engine.http.connections import Connections, TooFewFiles, most_connections
from engine.http.state import STATE, ServerState
from engine.loop.client import EngineClient, EngineDead, EngineRefused
from engine.machine import use
from engine.service import logs
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError
from engine.service.grammar_worker import GrammarWorker
from engine.service.start_check import check_headers, load_tokenizer
from engine.service.starting import StartReport
from engine.service.tokenizer import Tokenizer
from engine.startup.memory.report import describe_start

ABORT_S = 1.0
"""How long requests that were ended may take to write their error event."""
CLOSE_S = 15.0
"""How long closing may take: more than the engine client takes to kill an engine that does not end
(``CLOSE_TIMEOUT_S`` there)."""

log = structlog.get_logger("engine.server")


class Server:
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
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        """``clients``: the engines, by id. ``say`` shows a line to the person who started the server."""
        self._plan = plan
        self._clients = clients
        self._parts = (router, exporters, tokenizer, finders, grammars)
        self._say = say
        self._signals = 0
        self._interrupted = False
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self.port = 0
        """The port that is listened on, once :meth:`listen` has returned."""

    @property
    def state(self) -> ServerState:
        return self._app[STATE]

    async def run(self) -> int:
        """Serve until signalled. Returns 0 after a signal, 1 when the server or its engine could not go on, 2 when
        the configuration cannot run here."""
        try:
            await self.listen()
        except TooFewFiles as error:
            self._say(f"error: {error}")
            return 2
        except OSError as error:
            settings = self._plan.settings.server
            where = f"server.host={settings.host} server.port={settings.port}"
            other = "server.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "server.host"
            self._say(f"error: cannot listen on {where}: {error.strerror or 'failed'}. Choose another {other}.")
            return 1
        self._catch_signals()
        code = 0
        try:
            code = await self._serve()
        finally:
            await self.close()
        return code

    async def listen(self) -> None:
        """Open the listener. Raises ``OSError``, :class:`engine.http.connections.TooFewFiles`."""
        settings = self._plan.settings.server
        limit = most_connections(settings.max_connections)
        asyncio.get_running_loop().set_exception_handler(logs.on_loop_error)
        self._app = build_app(self._plan, self._clients, *self._parts)
        self._runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=ABORT_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self.connections = Connections(self._runner.server, limit)
        try:
            self._listener = await self.connections.listen(settings.host, settings.port)
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]

    def signalled(self, number: int = signal.SIGTERM) -> None:
        """A request to end: the first drains, the second does not wait. SIGINT comes from somebody who waits: there is
        no lame duck."""
        self._signals += 1
        self._interrupted = self._interrupted or number == signal.SIGINT
        (self._first_signal if self._signals == 1 else self._second_signal).set()

    async def close(self) -> None:
        """End the engines and the listener."""
        self._listener.close()
        await self.state.fleet.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*[client.close() for client in self._clients.values()])
        except TimeoutError:
            log.error("engine did not end in time")
        await self._runner.cleanup()
        self.connections.close()

    async def _serve(self) -> int:
        stopping = asyncio.create_task(self._first_signal.wait())
        running = asyncio.create_task(self._run_engines())
        try:
            await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._drain()
                return 0
            try:
                running.result()
            except EngineRefused as error:
                self._say(f"engine: {error}")
                return 2
            except EngineDead as error:
                self._say(f"error: the engine cannot run: {error}")
            return 1
        finally:
            stopping.cancel()
            running.cancel()
            await asyncio.gather(stopping, running, return_exceptions=True)

    async def _run_engines(self) -> None:
        """Until none is left: raises what ended the last one, or kept one from starting."""
        engines = self.state.engines.values()
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
        host = self._plan.settings.server.host
        host = f"[{host}]" if ":" in host else host
        self._say(f"ready: {self._plan.model.name} at http://{host}:{self.port}/v1")
        await self.state.fleet.watch()

    async def _start(self, engine: EngineHandle) -> None:
        where = f"{engine.id}: " if len(self.state.engines) > 1 else ""

        def say(line: str) -> None:
            self._say(where + line)

        async with StartReport(say) as report:
            await engine.supervisor.start(report.show)
        if engine.client.info is not None:
            say(describe_start(engine.client.info))

    async def _drain(self) -> None:
        admission, settings = self.state.admission, self._plan.settings.server
        self.state.fleet.closing = True
        hurry = asyncio.create_task(self._second_signal.wait())
        if settings.lame_duck_s and not self._interrupted:
            admission.lame_duck = True
            self._say(f"lame duck: /ready is 503, requests are taken for {settings.lame_duck_s:g} s more")
            await asyncio.wait({hurry}, timeout=settings.lame_duck_s)
        admission.draining = True
        self._say(f"draining: {admission.in_flight} sequences in flight")
        idle = asyncio.create_task(admission.until_idle(settings.drain_s))
        await asyncio.wait({hurry, idle}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if idle.done() and idle.result():
            return
        idle.cancel()
        admission.fail_all(
            ApiError(
                "unavailable", "The server shut down before this request was done.", code="shutdown", retry_after_s=5
            )
        )
        await admission.until_idle(ABORT_S)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled, number)


def serve(plan: EnginePlan, finders: Mapping[str, CommandProvider] | None = None) -> int:
    """Serve until a signal says otherwise; returns the process's exit code. ``finders``: commands that have findings,
    by the name that calls each.

    SIGTERM takes requests for another ``server.lame_duck_s``, then drains for at most ``server.drain_s``; SIGINT drains
    at once; a second signal ends at once. Raises
    :class:`engine.assembly.errors.AssemblyError`, before anything is started, for a checkpoint whose headers or
    tokenizer cannot be used.
    """
    from engine.assembly.bind import bind_api
    from engine.startup.process import ProcessEngineClient
    from engine.startup.replicas import devices_of, engine_id, with_memory

    logs.configure()
    check_headers(plan)
    tokenizer = load_tokenizer(plan)
    parts = bind_api(plan)
    plan = with_memory(plan)
    replicas = range(plan.settings.fleet.replicas)
    clients = {engine_id(plan, each): ProcessEngineClient(plan, devices_of(plan, each)) for each in replicas}
    server = Server(plan, clients, parts.router, parts.exporters, tokenizer, finders, GrammarWorker(plan))
    return asyncio.run(server.run())
