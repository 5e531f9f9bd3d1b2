"""``peer``: records that other engines have in memory, over TCP.

Engines with equal records (one namespace) tell each other which ones they have in memory, and send those that are
asked for. A thread talks; what memory has is looked up and held by the engine's loop, between two steps. What comes is
checked as a file's record would be. Whoever is late, gone, or does what no engine does, is cut off: what was
asked of it is a miss.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.kv_store import Lender, Loan, RecordId, RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext
from engine_plugins.kv_store.peer.asking import Peer, portions
from engine_plugins.kv_store.peer.greeting import Card, prepare, read_token
from engine_plugins.kv_store.peer.serving import Answer, Asked, Visitor
from engine_plugins.kv_store.peer.wire import GONE, HAVE, MOST_KNOWN, Misbehaved, say

MOST_VISITORS, MOST_STRANGERS = 64, 16
"""Connections of engines, and of those that have not greeted yet."""
SEEN_AGAIN = 2
"""Records that are looked at for each new one: whether they are still in memory."""
READY_S = 10.0


@dataclass(frozen=True)
class PeerConfig(SlotConfig):
    """Plain TCP is for networks that are trusted: keys and values are what prompts became, and are not encrypted."""

    peers: list[str] = field(default_factory=lambda: [f"127.0.0.1:{port}" for port in range(29701, 29705)])
    """Addresses of the engines, as ``HOST:PORT``: the same list for all. An engine's own is passed over."""
    listen: str = "auto"
    """Where this engine is reached; ``auto``: the first of ``peers`` that is a free port of this machine."""
    token_file: str = "auto"
    """A file with the word that engines must have in common; ``auto``: this user's, on this machine."""
    timeout_s: float = 5.0
    """How long an engine may take over a request; then it is cut off."""

    def __post_init__(self) -> None:
        for each in self.peers:
            address_of("kv_store.peer.peers", each)
        if self.listen != "auto":
            address_of("kv_store.peer.listen", self.listen)
        elif not self.peers:
            raise ValueError("kv_store.peer.peers=[]: expected HOST:PORT of each engine, or kv_store.peer.listen")
        at_least("kv_store.peer.timeout_s", self.timeout_s, 0.01)


def address_of(key: str, text: str) -> tuple[str, int]:
    """Raises ``ValueError``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{key}: {text!r} is no address; expected HOST:PORT, as in 127.0.0.1:29701")
    return host.strip("[]"), int(port)


@dataclass(slots=True, eq=False)
class Job:
    """One read; in parts, of one engine each."""

    number: int
    sizes: list[int]
    good: list[int]
    left: int


class PeerStore:
    """See :class:`engine.contracts.kv_store.LendingStore`."""

    def __init__(self, config: PeerConfig, context: BuildContext) -> None:
        self._config = config
        self._token = read_token(config.token_file)
        self._numbers = count()
        self._own: OrderedDict[RecordId, None] = OrderedDict()
        """What memory was said to have, as others know it. Of the loop, as is the lender."""
        self._lender: Lender | None = None
        self._news: deque[tuple[int, RecordId]] = deque()
        self._is_told = threading.Event()
        """Set: somebody is on the way to tell others what is new."""
        self._asked: deque[Asked] = deque()
        self._returned: deque[Loan] = deque()
        self._ended: deque[tuple[int, int]] = deque()
        self._visitors: set[Visitor] = set()
        self._faults = 0
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        """Raises ``ValueError`` where it cannot listen."""
        self._layout, self._wake = layout, wake
        self._card = Card(self._token, secrets.token_hex(8), layout)
        self._listener = self._listen()
        addresses = [address_of("kv_store.peer.peers", each) for each in self._config.peers]
        own = self._listener.getsockname()[:2]
        timeout_s = self._config.timeout_s
        self.peers = [Peer(each, self._card, timeout_s, wake) for each in addresses if each != own]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="kv-peer", daemon=True)
        self._thread.start()
        self._ready.wait(READY_S)

    def _listen(self) -> socket.socket:
        config = self._config
        key = "kv_store.peer.peers" if config.listen == "auto" else "kv_store.peer.listen"
        why = ""
        for text in config.peers if config.listen == "auto" else (config.listen,):
            host, port = address_of(key, text)
            try:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                listener = socket.create_server((host, port), family=family, backlog=MOST_STRANGERS)
            except OSError as error:
                why = why or f"{text}: {os.strerror(error.errno) if error.errno else error}"
            else:
                listener.setblocking(False)
                return listener
        raise ValueError(f"{key}: this engine cannot listen there ({why}); expected a free address of this machine")

    # What others have --------------------------------------------------------------------------------------------

    def has(self, group: int, key: bytes) -> bool:
        return any(peer.has((group, key)) for peer in self.peers)

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        runs: list[tuple[Peer, int, int]] = []
        for at, each in enumerate(ids):
            if runs and runs[-1][0].has(each):
                runs[-1] = (*runs[-1][:2], at + 1)
                continue
            peer = next((peer for peer in self.peers if peer.has(each)), None)
            if peer is None:
                break
            runs.append((peer, at, at + 1))
        parts = [
            (peer, ids[first:end][part], into[first:end][part])
            for peer, first, end in runs
            for part in portions(ids[first:end], self._layout.num_bytes)
        ]
        sizes = [len(own) for _, own, _ in parts]
        job = Job(next(self._numbers), sizes, [0] * len(parts), len(parts))
        if parts:
            self._call(self._begin, job, parts)
        else:
            self._ended.append((job.number, 0))
            self._wake()
        return job.number

    def _begin(self, job: Job, parts: Sequence[tuple[Peer, Sequence[RecordId], Sequence[memoryview]]]) -> None:
        for at, (peer, ids, into) in enumerate(parts):
            peer.ask(ids, into, partial(self._part_ended, job, at))

    def _part_ended(self, job: Job, part: int, good: int) -> None:
        job.good[part] = good
        job.left -= 1
        if job.left:
            return
        total = 0
        for size, found in zip(job.sizes, job.good, strict=True):
            total += found
            if found < size:
                break
        self._ended.append((job.number, total))
        self._wake()

    # What this engine has ----------------------------------------------------------------------------------------

    def serve(self, lender: Lender) -> None:
        self._lender = lender

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        self._own[group, key] = None
        self._own.move_to_end((group, key))
        self._tell(HAVE, (group, key))
        for each in [each for each, _ in zip(self._own, range(SEEN_AGAIN), strict=False)]:
            if self._lender is not None and self._lender.has(*each) and len(self._own) <= self._most_own:
                self._own.move_to_end(each)
            else:
                self._gone(each)
        done()
        return True

    @property
    def _most_own(self) -> int:
        return MOST_KNOWN * len(self._layout.num_bytes)

    def _gone(self, each: RecordId) -> None:
        if self._own.pop(each, self) is not self:
            self._tell(GONE, each)

    def _tell(self, kind: int, each: RecordId) -> None:
        self._news.append((kind, each))
        if not self._is_told.is_set():
            self._is_told.set()
            self._call(self._tell_visitors)

    def _tell_visitors(self) -> None:
        self._is_told.clear()
        with suppress(IndexError):  # clear() may empty it meanwhile
            while True:
                kind, each = self._news.popleft()
                for visitor in self._visitors:
                    if visitor.is_welcome:
                        visitor.tell(kind, [each])

    def poll(self) -> Sequence[tuple[int, int]]:
        while self._returned:
            self._returned.popleft().give_back()
        while self._asked:
            asked = self._asked.popleft()
            if asked.ids is None:
                self._call(asked.by.tell, HAVE, list(self._own))
            else:
                loans = self._lend(asked.ids)
                self._call(asked.by.answer, Answer(asked.number, asked.ids, loans))
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _lend(self, ids: Sequence[RecordId]) -> list[Loan]:
        loans: list[Loan] = []
        for each in ids:
            loan = self._lender.lend(*each) if self._lender is not None and each in self._own else None
            if loan is None:
                if self._lender is not None and not self._lender.has(*each):
                    self._gone(each)
                break
            loans.append(loan)
        return loans

    def _ask(self, asked: Asked) -> None:
        self._asked.append(asked)
        self._wake()

    def _came(self) -> None:
        for peer in self.peers:
            peer.somebody_came()

    def _give_back(self, loans: Sequence[Loan]) -> None:
        self._returned.extend(loans)
        self._wake()

    # The thread --------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function, *args)

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        tasks = [asyncio.create_task(self._accept()), *(asyncio.create_task(peer.run()) for peer in self.peers)]
        self._ready.set()
        try:
            await self._end.wait()
        finally:
            for task in tasks:
                task.cancel()
            self._listener.close()

    async def _accept(self) -> None:
        tasks = set[asyncio.Task[None]]()
        while True:
            try:
                sock, (host, port, *_) = await self._loop.sock_accept(self._listener)
            except OSError:  # too many open files, or one that has left
                await asyncio.sleep(0.1)
                continue
            welcome = sum(visitor.is_welcome for visitor in self._visitors)
            if welcome >= MOST_VISITORS or len(self._visitors) - welcome >= MOST_STRANGERS:
                sock.close()
                continue
            prepare(sock)
            visitor = Visitor(sock, self._card, self._config.timeout_s, self._ask, self._give_back, self._came)
            self._visitors.add(visitor)
            task = asyncio.create_task(self._visit(visitor, f"{host}:{port}"))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _visit(self, visitor: Visitor, name: str) -> None:
        try:
            await visitor.run()
        except (Misbehaved, TimeoutError, ValueError) as error:
            self._faults += 1
            say(f"{name} was cut off: it {str(error) or 'did not greet'}")
        except (OSError, EOFError):
            pass
        finally:
            self._visitors.discard(visitor)

    # All of it ---------------------------------------------------------------------------------------------------

    def usage(self) -> StoreUsage:
        """Of what others are known to have."""
        by_group = [sum(counts) for counts in zip(*(map(len, peer.known) for peer in self.peers), strict=True)]
        sizes = self._layout.num_bytes
        taken = sum(records * size for records, size in zip(by_group, sizes, strict=False))
        most = MOST_KNOWN * sum(sizes) * max(1, len(self.peers))
        faults = self._faults + sum(peer.faults for peer in self.peers)
        return StoreUsage(sum(by_group), taken, most, faults=faults)

    def clear(self) -> None:
        self._own.clear()
        self._news.clear()
        for peer in self.peers:
            peer.forget()
        self._call(self._cut_all)

    def _cut_all(self) -> None:
        for peer in self.peers:
            peer.cut()
        for visitor in self._visitors:
            visitor.cut()

    def close(self, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        self._call(self._end.set)
        self._thread.join(max(0.0, ends - time.monotonic()))
