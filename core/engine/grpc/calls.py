"""Around every method: who may call it, how long it may take, what an error looks like, one log line.

A method is registered as one that streams both ways, whatever it is to clients: on the wire that is the same, and only
so is a call's message read after its key was looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import StatusCode

from engine.contracts.events import DEFAULT_ENGINE, RejectedEvent
from engine.grpc.errors import HTTP_STATUS, GrpcError, status_of, trailing_metadata
from engine.grpc.peers import address_of
from engine.service.admission import Flight
from engine.service.errors import ApiError
from engine.service.keys import Caller, WrongKey, caller_of, client_name, sent_keys
from engine.service.logs import echoed_id
from engine.service.timings import Written
from engine.service.transport import Backend

READ_S = 30.0
"""How long the message of a call may take to arrive."""
MOST_READ = 16
"""Messages of one client that are read at a time: each may have ``server.max_body_bytes``."""
SPARE_CALLS = 64
"""One client may have ``2 * server.max_queue + SPARE_CALLS`` calls open: the rest is for others."""
MOST_KEYLESS = 32
"""Calls of one address that need no key, at a time: they may go on for as long as they like."""
WRITE_S = 60.0
"""A client that reads nothing for so long is cut off."""
LOOK_S = 5.0
"""How often clients are looked at that read nothing."""

Access = Literal["open", "key", "admin"]
log = structlog.get_logger("engine.access")


class Turns:
    """Those of each client to have a message read."""

    def __init__(self) -> None:
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()
        """Calls that have a turn or wait for one."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        semaphore = self._semaphores.setdefault(client, asyncio.Semaphore(MOST_READ))
        self._users[client] += 1
        try:
            async with semaphore:
                yield
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._semaphores[client]


class Call:
    """One call. ``write`` its answers."""

    def __init__(self, context: Any, backend: Backend, turns: Turns) -> None:
        self.received_s = time.monotonic()
        self.backend = backend
        self.caller: Caller | None = None
        self.client = ""
        """Who sent it: the queue is fair among clients."""
        self.request_id = ""
        """What the client calls it."""
        self.slo_class = ""
        self.flight: Flight | None = None
        """Once it is admitted."""
        self.writing_s = 0.0
        """Since when the client has been given a message; 0: it is given none."""
        self.unread = False
        """It was ended because the client reads nothing."""
        self.task = asyncio.current_task()
        self._context = context
        self._turns = turns
        self._metadata: tuple[tuple[str, Any], ...] = context.invocation_metadata() or ()
        self._write_s = self._last_write_s = 0.0

    def metadata(self, name: str) -> list[str]:
        """What the client sent under this name."""
        return [value for key, value in self._metadata if key == name and isinstance(value, str)]

    @property
    def peer(self) -> str:
        return address_of(self._context.peer())

    @property
    def time_left_s(self) -> float | None:
        """Until the client's deadline."""
        left: float | None = self._context.time_remaining()
        return left

    @property
    def written(self) -> Written:
        """What waiting for the client took."""
        return Written(self._write_s * 1e3, self._last_write_s * 1e3)

    async def write(self, message: Any) -> None:
        """Send a message, once the client has room for it."""
        begun_s = self.writing_s = time.monotonic()
        try:
            await self._context.write(message)
        finally:
            self._last_write_s = time.monotonic() - begun_s
            self._write_s += self._last_write_s
            self.writing_s = 0.0

    async def read(self) -> Any:
        """The message, once it is the client's turn. Raises :class:`GrpcError`."""
        try:
            async with self._turns.turn(self.client), asyncio.timeout(READ_S):
                message = await self._context.read()
        except DecodeError:
            message = grpc.aio.EOF
        except TimeoutError:
            words = f"The message did not arrive within {READ_S:.0f} s."
            raise GrpcError(StatusCode.DEADLINE_EXCEEDED, words, code="message_timeout") from None
        if message is grpc.aio.EOF:
            raise GrpcError(
                StatusCode.INVALID_ARGUMENT,
                "There is no message, or it is not of the type that this method takes.",
                code="no_message",
            )
        return message

    def fail(self, error: ApiError) -> None:
        """Have the call end with ``error`` once its method returns. ``context.abort`` would raise, and grpc keeps the
        frames of what was raised."""
        self._context.set_code(status_of(error))
        self._context.set_details(error.message)
        self._context.set_trailing_metadata(trailing_metadata(error))


Serve = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service. ``message``: the type it takes; ``serve`` reads it and writes the answers. ``admin``:
    where keys are told apart, it is for those with admin."""

    name: str
    message: Any
    serve: Serve
    access: Access = "key"
    is_probe: bool = False
    """It is called again and again: no news for the log."""


class Calls:
    """All calls of a server."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: set[Call] = set()
        self._most = 2 * backend.settings.max_queue + SPARE_CALLS
        self._held: Counter[tuple[str, bool]] = Counter()
        """Open calls by client, those that need no key apart."""
        self._turns = Turns()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look())

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def handler(self, method: Method) -> Any:
        """What grpc calls."""

        async def serve(_: Any, context: Any) -> None:
            await self._serve(method, context)

        return grpc.stream_stream_rpc_method_handler(
            serve, method.message.FromString, lambda answer: answer.SerializeToString()
        )

    @contextmanager
    def place(self, client: str, *, keyless: bool) -> Iterator[None]:
        """One of those that a client may have. Raises :class:`GrpcError`."""
        who, most = (client, keyless), MOST_KEYLESS if keyless else self._most
        if self._held[who] >= most:
            raise GrpcError(StatusCode.RESOURCE_EXHAUSTED, f"{most} calls of this client are open.", code="many_calls")
        self._held[who] += 1
        try:
            yield
        finally:
            self._held[who] -= 1
            if not self._held[who]:
                del self._held[who]

    def abort(self, owner: str, names: set[str]) -> int:
        """End the requests of ``owner`` that have these names; returns how many there were."""
        found = [call for call in self._open if call.request_id in names and owner_of(call.caller) == owner]
        flights = [call.flight for call in found if call.flight is not None]
        for flight in flights:
            flight.fail(GrpcError(StatusCode.CANCELLED, "The request was aborted.", code="aborted"))
        return len(flights)

    async def _serve(self, method: Method, context: Any) -> None:
        call = Call(context, self._backend, self._turns)
        status: StatusCode = StatusCode.CANCELLED
        self._open.add(call)
        try:
            failure = await self._answered(method, call)
            status = StatusCode.OK if failure is None else status_of(failure)
            if failure is not None:
                call.fail(failure)
        finally:
            self._open.discard(call)
            (log.debug if method.is_probe else log.info)(
                "call",
                method=method.name,
                status=status.name,
                ms=round((time.monotonic() - call.received_s) * 1e3, 1),
                request_id=echoed_id(call.request_id),
                **({} if call.caller is None else {"key": call.caller.name}),
            )

    async def _answered(self, method: Method, call: Call) -> ApiError | None:
        """Why it failed; ``None``: it did not."""
        left_s = call.time_left_s
        timer = asyncio.timeout(left_s)
        try:
            async with timer:
                self._authorise(method, call)
                with self.place(call.client, keyless=method.access == "open"):
                    await method.serve(call)
            return None
        except ApiError as error:
            if method.access == "key" and _is_refusal(error):
                status, code = HTTP_STATUS[status_of(error)], error.code or "invalid_request"
                self._backend.bus.publish(
                    (RejectedEvent(time.monotonic(), status, code, self._refuser, call.slo_class),)
                )
            return error
        except TimeoutError:
            if not timer.expired():
                raise
            words = f"The request was not done within {left_s or 0:.3f} s, its deadline."
            return GrpcError(StatusCode.DEADLINE_EXCEEDED, words, code="deadline_exceeded")
        except asyncio.CancelledError:
            if not call.unread:
                raise  # the client is gone
            assert call.task is not None
            call.task.uncancel()
            words = f"The client has read nothing for {WRITE_S:.0f} s."
            return GrpcError(StatusCode.CANCELLED, words, code="not_read")
        except grpc.aio.BaseError:
            raise  # the call is over
        except Exception as error:
            # The last resort: the fault is logged by type and place, the client learns nothing internal.
            log.error("call failed", error=type(error).__name__, at=_place(error), method=method.name)
            return ApiError("failed", "The server failed on this request.", code="internal_error")

    def _authorise(self, method: Method, call: Call) -> None:
        """Before the message is read. Raises :class:`GrpcError`."""
        settings, keys = self._backend.settings, self._backend.keys
        if method.access != "open":
            sent = sent_keys(call.metadata("authorization"), call.metadata("x-api-key"))
            try:
                call.caller = caller_of(settings.api_key, keys, sent)
            except WrongKey:
                words = "Wrong or missing API key; send the metadata 'authorization: Bearer <key>'."
                raise GrpcError(StatusCode.UNAUTHENTICATED, words, code="invalid_api_key") from None
            if method.access == "admin" and call.caller is not None and not call.caller.admin:
                words = f"{method.name} is for keys with admin (server.keys)."
                raise GrpcError(StatusCode.PERMISSION_DENIED, words, code="admin_only")
        call.client = client_name(call.caller, call.peer)

    @property
    def _refuser(self) -> str:
        return next(iter(self._backend.engines), DEFAULT_ENGINE)

    async def _look(self) -> None:
        """End calls whose clients read nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            before_s = time.monotonic() - WRITE_S
            for call in self._open:
                if 0 < call.writing_s < before_s and not call.unread and call.task is not None:
                    call.unread = True
                    call.task.cancel()


def owner_of(caller: Caller | None) -> str:
    """Whose requests may be aborted by name; all belong to one where keys are not told apart."""
    return "" if caller is None else caller.of


def _is_refusal(error: ApiError) -> bool:
    """Whether the request was refused at the door, as opposed to failed on the way."""
    return HTTP_STATUS[status_of(error)] < 499 or error.code in ("draining", "not_ready")


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "unknown" if trace is None else f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}"
