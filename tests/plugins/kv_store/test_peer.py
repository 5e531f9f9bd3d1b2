"""Records of other engines: whoever is late, gone, or does what no engine does, is a miss, and nothing worse."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from tests.addresses import free_addresses

from engine.contracts.kv_store import RecordLayout
from engine.testing.context import build_context
from engine.testing.kv_store import LAYOUT, LONGEST_S, OTHER, KVStoreConformance, Pair, ids_of, num_had, record_of
from engine_plugins.kv_store.peer import asking, wire
from engine_plugins.kv_store.peer.asking import portions
from engine_plugins.kv_store.peer.greeting import NotWelcome, greet, read_token, welcome
from engine_plugins.kv_store.peer.store import PeerConfig, PeerStore
from engine_plugins.kv_store.peer.wire import GET, HAVE, MISSING, RECORD, message
from engine_plugins.kv_store.record_header import header_of


class Suite(KVStoreConformance):
    """Stores find each other in a list of addresses, as engines do."""

    timeout_s = 5.0

    def __init__(self, addresses: list[str]) -> None:
        self.peers = addresses

    def make(self) -> PeerStore:
        return PeerStore(PeerConfig(self.peers, timeout_s=self.timeout_s), build_context())

    def pair(self, layout: RecordLayout = LAYOUT) -> Pair:
        store = self.staged(layout)
        assert isinstance(store, Pair)
        return store


@pytest.fixture(autouse=True)
def _own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class TestConformance(KVStoreConformance):
    @pytest.fixture(autouse=True)
    def _addresses(self) -> None:
        self.peers = free_addresses(4)

    def make(self) -> PeerStore:
        return PeerStore(PeerConfig(self.peers), build_context())


@pytest.fixture
def suite() -> Suite:
    return Suite(free_addresses(2))


def until(true: Callable[[], bool]) -> bool:
    ends = time.monotonic() + LONGEST_S
    while not true() and time.monotonic() < ends:
        time.sleep(0.002)
    return true()


# An engine that is none -----------------------------------------------------------------------------------------------


class Liar:
    """Greets as an engine does, says that it has some records, and answers in a way of its own."""

    def __init__(self, address: str, answer: Callable[[socket.socket, int, list[tuple[int, bytes]]], None]) -> None:
        host, _, port = address.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        self._answer = answer
        self.card = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, store: PeerStore) -> None:
        self.card = type(store._card)(store._token, "liar", store._layout)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                self._serve(self._listener.accept()[0])

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, EOFError, ValueError), sock:
            sock.setblocking(False)
            assert self.card is not None
            asyncio.run(welcome(sock, self.card))
            sock.settimeout(LONGEST_S)
            sock.sendall(message(HAVE, ids_of(8)))
            while True:
                kind, count, number = wire.MESSAGE.unpack(self._read(sock, wire.MESSAGE.size))
                assert kind == GET
                ids = list(wire.ID.iter_unpack(self._read(sock, count * wire.ID.size)))
                self._answer(sock, number, ids)

    def _read(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def record(
    number: int, each: tuple[int, bytes], text: bytes | None = None, namespace: bytes = LAYOUT.namespace
) -> bytes:
    data = record_of(each) if text is None else text
    return message(RECORD, number=number) + header_of(each, memoryview(data), namespace) + data


LIES: dict[str, Callable[[socket.socket, int, list[tuple[int, bytes]]], object]] = {
    "another namespace": lambda sock, number, ids: sock.sendall(record(number, ids[0], namespace=OTHER.namespace)),
    "another key": lambda sock, number, ids: sock.sendall(
        record(number, (ids[0][0], sha256(b"?").digest()), bytes(4096))
    ),
    "another group": lambda sock, number, ids: sock.sendall(record(number, (1 - ids[0][0], ids[0][1]))),
    "damaged": lambda sock, number, ids: sock.sendall(record(number, ids[0])[:-1] + b"?"),
    "short": lambda sock, number, ids: sock.sendall(record(number, ids[0], record_of(ids[0])[:-9])),
    "long": lambda sock, number, ids: sock.sendall(record(number, ids[0], record_of(ids[0]) * 9)),
    "another request": lambda sock, number, ids: sock.sendall(record(number + 1, ids[0])),
    "no message": lambda sock, number, ids: sock.sendall(b"\xff" * 4096),
    "too many names": lambda sock, number, ids: sock.sendall(wire.MESSAGE.pack(HAVE, 0xFFFF, 0)),
    "a flood of names": lambda sock, number, ids: [
        sock.sendall(message(HAVE, ids_of(250, f"{at}"))) for at in range(9)
    ],
    "half, then nothing": lambda sock, number, ids: sock.sendall(record(number, ids[0])[:500]),
    "nothing": lambda sock, number, ids: None,
    "more after the end": lambda sock, number, ids: sock.sendall(message(MISSING, number=number) * 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_stalls_or_floods_is_a_miss_and_a_fault(
    lie: str, suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MOST_NEWS", 1000)
    suite.timeout_s = 0.3
    liar = Liar(suite.peers[0], LIES[lie])
    store, suite.woken = suite.make(), threading.Event()
    store.open(LAYOUT, suite.woken.set)
    liar.start(store)
    assert until(lambda: num_had(store, ids_of(8)) == 8)
    assert suite.read(store, ids_of(8)) == []
    assert until(lambda: store.usage().faults == 1)
    assert num_had(store, ids_of(8)) == 0, "it is still believed"
    liar.close()
    store.close(1.0)


def test_what_was_whole_before_a_peer_lied_is_of_use(suite: Suite) -> None:
    def two_and_a_lie(sock: socket.socket, number: int, ids: list[tuple[int, bytes]]) -> None:
        sock.sendall(record(number, ids[0]) + record(number, ids[1]) + record(number, ids[2], bytes(4096)))
        sock.sendall(record(number, ids[4]))

    liar = Liar(suite.peers[0], two_and_a_lie)
    store, suite.woken = suite.make(), threading.Event()
    store.open(LAYOUT, suite.woken.set)
    liar.start(store)
    assert until(lambda: num_had(store, ids_of(8)) == 8)
    assert suite.read(store, ids_of(8))[:2] == [record_of(each) for each in ids_of(2)]
    liar.close()
    store.close(1.0)


# Somebody who asks ----------------------------------------------------------------------------------------------------


@contextmanager
def visiting(store: PeerStore) -> Iterator[socket.socket]:
    host, port = store._listener.getsockname()
    with socket.create_connection((host, port)) as sock:
        sock.setblocking(False)
        asyncio.run(greet(sock, type(store._card)(store._token, "visitor", store._layout), "all"))
        sock.settimeout(LONGEST_S)
        yield sock


def is_cut_off(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_who_asks_and_does_not_read_or_asks_for_too_much_is_cut_off(suite: Suite) -> None:
    suite.timeout_s = 0.3
    pair = suite.pair()
    suite.written(pair, ids_of(8))
    gives = pair.gives
    assert isinstance(gives, PeerStore)
    for data in (
        message(GET, ids_of(64)) * (wire.CREDIT + 1),
        wire.MESSAGE.pack(GET, wire.MOST_ASKED + 1, 0),
        wire.MESSAGE.pack(GET, 0, 0),
        message(GET, [(9, bytes(32))]),
        message(GET, ids_of(4))[:30],
        b"\xff" * 99,
    ):
        before = gives.usage().faults
        with visiting(gives) as sock:
            sock.sendall(data)
            assert is_cut_off(sock), data[:40]
        assert until(lambda before=before: gives.usage().faults == before + 1)
    assert suite.read(pair, ids_of(8)) == [record_of(each) for each in ids_of(8)], "others are served on"
    assert until(lambda: not pair.poll() and pair.memory.num_lent == 0)
    pair.close(1.0)


def test_who_does_not_read_is_cut_off_and_lends_nothing_for_ever(suite: Suite) -> None:
    suite.timeout_s = 0.3
    layout = RecordLayout(LAYOUT.namespace, (4 << 20,))
    pair = suite.pair(layout)
    key = ids_of(1)[0][1]
    pair.memory.records[0, key] = bytearray(4 << 20)
    gives = pair.gives
    assert isinstance(gives, PeerStore)
    gives.put(0, key, memoryview(pair.memory.records[0, key]), lambda: None)
    with visiting(gives) as sock:
        sock.sendall(message(GET, [(0, key)] * 8))
        assert until(lambda: not pair.poll() and pair.memory.num_lent == 8)
        assert until(lambda: not pair.poll() and pair.memory.num_lent == 0)
        assert until(lambda: gives.usage().faults == 1)
    pair.close(1.0)


# Who may ask ----------------------------------------------------------------------------------------------------------


class Stderr:
    """All that was written until now."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._text = capfd, ""

    def has(self, *words: str) -> bool:
        self._text += self._capfd.readouterr().err
        return all(word in self._text for word in words)


def test_engines_without_the_token_or_of_another_namespace_hear_why(
    suite: Suite, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, stderr = suite.make(), Stderr(capfd)
    store.open(LAYOUT, lambda: None)
    for layout in (OTHER, RecordLayout(LAYOUT.namespace, (4096, 2000))):
        other = suite.make()
        other.open(layout, lambda: None)
        both = [
            f"namespace {each.namespace.hex()} with records of {','.join(map(str, each.num_bytes))} bytes"
            for each in (LAYOUT, layout)
        ]
        assert until(lambda both=both: stderr.has("turned this engine away", *both))  # type: ignore[misc]
        other.close(1.0)
    (tmp_path / "token").write_text("another-word-of-the-least-length")
    stranger = PeerStore(PeerConfig(suite.peers, token_file=str(tmp_path / "token")), build_context())
    stranger.open(LAYOUT, lambda: None)
    assert until(lambda: stderr.has("its token is another one"))
    stranger.close(1.0)
    store.close(1.0)


def test_who_listens_without_the_token_is_not_believed(suite: Suite) -> None:
    store = suite.make()
    store.open(LAYOUT, lambda: None)
    theirs, ours = socket.socketpair()
    card = type(store._card)
    for sock in (theirs, ours):
        sock.setblocking(False)

    async def meet() -> None:
        await asyncio.gather(welcome(ours, card("y" * 16, "thief", LAYOUT)), greet(theirs, store._card, "all"))

    with pytest.raises(NotWelcome, match="token"):
        asyncio.run(meet())
    store.close(1.0)


def test_the_users_token_is_made_once_and_is_this_users_alone(tmp_path: Path) -> None:
    found = {read_token("auto") for _ in range(3)}
    assert len(found) == 1 and len(found.pop()) == 64
    (file,) = (tmp_path / "engine" / "peers").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    (tmp_path / "short").write_text("secret")
    with pytest.raises(ValueError, match=r"kv_store\.peer\.token_file=.*16 characters"):
        read_token(str(tmp_path / "short"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peers": ["here"]}, r"kv_store\.peer\.peers: 'here' is no address; expected HOST:PORT"),
        ({"listen": "1.2.3.4:99999"}, r"kv_store\.peer\.listen: '1\.2\.3\.4:99999' is no address"),
        ({"peers": []}, r"kv_store\.peer\.peers=\[\]: expected HOST:PORT"),
        ({"timeout_s": 0.0}, r"kv_store\.peer\.timeout_s=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PeerConfig(**config)  # type: ignore[arg-type]


def test_an_engine_that_finds_no_free_address_says_so(suite: Suite) -> None:
    suite.peers = suite.peers[:1]
    store = suite.make()
    store.open(LAYOUT, lambda: None)
    with pytest.raises(ValueError, match=r"kv_store\.peer\.peers: this engine cannot listen there .*in use"):
        suite.make().open(LAYOUT, lambda: None)
    store.close(1.0)


# Coming and going -----------------------------------------------------------------------------------------------------


def test_a_peer_that_has_gone_is_a_miss_and_one_that_comes_back_is_asked_again(suite: Suite) -> None:
    pair, ids = suite.pair(), ids_of(8)
    suite.written(pair, ids)
    pair.gives.close(1.0)
    assert until(lambda: num_had(pair, ids) == 0)
    assert suite.read(pair, ids) == [] and pair.usage().faults == 0, "that is no fault"
    pair.gives = suite.make()
    pair.gives.open(LAYOUT, suite.woken.set)
    pair.gives.serve(pair.memory)
    suite.written(pair, ids)
    assert suite.read(pair, ids) == [record_of(each) for each in ids]
    pair.close(1.0)


def test_a_peer_that_starts_again_is_asked_as_soon_as_it_comes(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_PAUSE_S", 1e3)
    monkeypatch.setattr(asking, "LONGEST_PAUSE_S", 1e3)
    pair = suite.pair()  # the first one has looked for the second before that was there
    assert until(lambda: bool(pair.gives.peers[0]._socket))  # type: ignore[attr-defined]
    pair.close(1.0)


def test_who_comes_later_hears_of_what_is_there(suite: Suite) -> None:
    pair, ids = suite.pair(), ids_of(8)
    suite.written(pair, ids)
    pair.asks.close(1.0)
    pair.asks = suite.make()
    pair.asks.open(LAYOUT, suite.woken.set)
    assert until(lambda: not pair.poll() and num_had(pair, ids) == 8)
    assert suite.read(pair, ids) == [record_of(each) for each in ids]
    pair.close(1.0)


def test_what_made_way_in_memory_is_soon_named_no_more(suite: Suite) -> None:
    pair = suite.pair()
    for number in range(30):
        suite.written(pair, ids_of(4, f"{number}"))
        pair.memory.records.clear()
    assert until(lambda: pair.usage().records <= 16)
    pair.close(1.0)


def test_a_read_is_cut_into_requests_of_bounded_size() -> None:
    ids = ids_of(200)
    parts = portions(ids, LAYOUT.num_bytes)
    assert [each for part in parts for each in ids[part]] == ids
    assert max(len(ids[part]) for part in parts) <= wire.MOST_ASKED
    assert [len(ids[part]) for part in portions(ids[:4], (5 << 20, 1))] == [2, 2]
    assert portions(ids[:1], (99 << 20, 1)) == [slice(0, 1)]
