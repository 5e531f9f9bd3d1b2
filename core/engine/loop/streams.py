"""The asyncio side of an engine client: output streams, events, and what happens to them when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from engine.contracts.events import Event
from engine.contracts.request import EngineRequest, FinishReason, TokensOut
from engine.loop.client import EngineDead, EngineRefused
from engine.loop.messages import (
    Abort,
    CauseOfDeath,
    EngineInfo,
    EngineStats,
    ExpertLoad,
    Failed,
    FromEngine,
    Heartbeat,
    Progress,
    ReadExpertLoad,
    Ready,
    StepOutputs,
    Submit,
    ToEngine,
)


class Stream:
    """Outputs of one sequence. See :class:`engine.loop.client.OutputStream`."""

    def __init__(self, request_id: str, abort: Callable[[str, FinishReason], None]) -> None:
        self._request_id = request_id
        self._abort = abort
        self._queue: asyncio.Queue[TokensOut | EngineDead] = asyncio.Queue()
        self._ended = False

    def put(self, item: TokensOut | EngineDead) -> None:
        self._queue.put_nowait(item)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokensOut:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineDead):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    def abort(self, reason: FinishReason = "abort") -> None:
        self._abort(self._request_id, reason)


class ClientBase:
    """What every engine client does with the engine's messages; subclasses carry them."""

    def __init__(self) -> None:
        self.alive = False
        self.own_words = ""
        """Of an engine that failed: why."""
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self.heartbeat = Heartbeat()
        self.num_messages = 0
        self.cause_of_death = ""
        self._streams: dict[str, Stream] = {}
        self._event_callbacks: list[Callable[[Sequence[Event]], None]] = []
        self._on_progress: Callable[[Progress], None] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._expert_load: asyncio.Future[Mapping[int, tuple[int, ...]]] | None = None

    def send(self, message: ToEngine) -> None:
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> Stream:
        if not self.alive:
            raise EngineDead("the engine is not running")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        self.send(Submit(request))
        stream = self._streams[request.request_id] = Stream(request.request_id, self._abort)
        return stream

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        if self.alive and request_id in self._streams:
            with contextlib.suppress(EngineDead):  # dead, but the news is still on its way
                self.send(Abort((request_id,), reason))

    def on_events(self, callback: Callable[[Sequence[Event]], None]) -> None:
        self._event_callbacks.append(callback)

    async def expert_load(self) -> Mapping[int, tuple[int, ...]]:
        if not self.alive:
            raise EngineDead("the engine is not running")
        if self._expert_load is None:  # who asks meanwhile gets the same answer
            self.send(ReadExpertLoad())
            self._expert_load = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._expert_load)

    def deliver(self, message: FromEngine) -> None:
        """Take a message from the engine; on the event loop's thread."""
        self.num_messages += 1
        match message:
            case StepOutputs(outputs, events, stats):
                self.stats = stats
                for output in outputs:
                    self._deliver_output(output)
                if events:
                    for callback in self._event_callbacks:
                        callback(events)
            case Heartbeat():
                self.heartbeat = message
            case ExpertLoad(layers) if self._expert_load is not None:
                self._expert_load.set_result(layers)
                self._expert_load = None
            case Progress() if self._on_progress is not None:
                self._on_progress(message)
            case Ready(info):
                self.info, self.alive = info, True
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case Failed(error, phase, refused, cause):
                kind = EngineRefused if refused else EngineDead
                self.own_words = f"{error} (while {phase})" if phase else error
                self.died(self.own_words, kind, cause)

    def _deliver_output(self, output: TokensOut) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(output)

    def died(self, why: str, kind: type[EngineDead] = EngineDead, cause: CauseOfDeath = "engine_dead") -> None:
        """The engine is gone: everybody who waits for it learns why."""
        self.alive = False
        self.cause_of_death = why
        self.stats, self.heartbeat = EngineStats(), Heartbeat()
        dead = kind(why, cause)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(dead)
        if self._expert_load is not None:
            self._expert_load.set_exception(dead)
            self._expert_load = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(dead)
