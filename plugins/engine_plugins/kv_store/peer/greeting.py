"""How two engines find out whether they may share records: both have the token, and their records are alike.

The token does not travel. Who listens sends a random number; who comes answers with one of its own and a digest of
both, the token and all that it says of itself; the welcome is such a digest, too. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from engine.contracts.kv_store import RecordLayout
from engine.contracts.parallelism import WELCOME
from engine.native.folder import unusable, user_folder
from engine_plugins.kv_store.peer.wire import Misbehaved, receive_line
from engine_plugins.parallelism.listening import GREETING_S, KEEPALIVE

LONGEST_LINE = 2048
SHORTEST_TOKEN = 16
ALL, NEW = "all", "new"
"""Whether who comes wants to hear of all records, or of new ones."""
ITSELF = "itself"


class NotWelcome(Exception):
    """The other side says why."""


class ItIsMe(Exception):
    """An engine has come to itself."""


@dataclass(frozen=True, slots=True)
class Card:
    """What an engine says of itself."""

    token: str
    instance: str
    """Random: of this start of the engine."""
    layout: RecordLayout

    @property
    def records(self) -> str:
        return f"{self.layout.namespace.hex()} {','.join(map(str, self.layout.num_bytes))}"

    def proof(self, side: str, *said: str) -> str:
        return hmac.digest(self.token.encode(), " ".join((side, *said)).encode(), "sha256").hex()


async def greet(sock: socket.socket, card: Card, wants: str) -> None:
    """As who comes. Raises :class:`NotWelcome`, :class:`ItIsMe`, :class:`Misbehaved`, ``TimeoutError``, ``EOFError``,
    ``OSError``."""
    async with asyncio.timeout(GREETING_S):
        theirs, ours = await receive_line(sock, LONGEST_LINE), secrets.token_hex(16)
        said = (theirs, ours, card.instance, card.records, wants)
        await _say(sock, " ".join((*said[1:], card.proof("asks", *said))))
        answer = await receive_line(sock, LONGEST_LINE)
    if answer == ITSELF:
        raise ItIsMe
    word, _, proof = answer.partition(" ")
    if word != WELCOME:
        raise NotWelcome(answer)
    if not hmac.compare_digest(proof.encode(), card.proof("serves", *said).encode()):
        raise NotWelcome("its token is another one")


async def welcome(sock: socket.socket, card: Card) -> str | None:
    """As who listens: what who comes wants, or ``None`` for somebody who was turned away. Raises as :func:`greet`."""
    async with asyncio.timeout(GREETING_S):
        ours = secrets.token_hex(16)
        await _say(sock, ours)
        *said, proof = (await receive_line(sock, LONGEST_LINE)).split(" ")
        if not hmac.compare_digest(proof.encode(), card.proof("asks", ours, *said).encode()):
            await _say(sock, "its token is another one")
            return None
        if len(said) != 5 or said[4] not in (ALL, NEW):
            raise Misbehaved("greeted in another way than this version does")
        _, instance, namespace, sizes, wants = said
        if instance == card.instance:
            await _say(sock, ITSELF)
            return None
        if f"{namespace} {sizes}" != card.records:
            own = f"namespace {card.layout.namespace.hex()} with records of {_sizes(card)} bytes"
            await _say(sock, f"it has {own}, this engine namespace {namespace} with records of {sizes} bytes")
            return None
        await _say(sock, f"{WELCOME} {card.proof('serves', ours, *said)}")
    return wants


def _sizes(card: Card) -> str:
    return ",".join(map(str, card.layout.num_bytes))


async def _say(sock: socket.socket, line: str) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, f"{line}\n".encode())


def prepare(sock: socket.socket) -> None:
    """Options of a connection: nothing waits to be sent, a machine that is gone is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def read_token(file: str) -> str:
    """Raises ``ValueError``. ``auto``: this user's, which is made if need be."""
    path = _users_token() if file == "auto" else Path(file).expanduser()
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"kv_store.peer.token_file={file} cannot be read: {error}") from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or len(token.split()) != 1:
        raise ValueError(
            f"kv_store.peer.token_file={file}: expected one word of {SHORTEST_TOKEN} characters or more, as "
            "`openssl rand -hex 32` prints it"
        )
    return token


def _users_token() -> Path:
    folder = user_folder("peers")
    reason = unusable(folder)
    if reason is not None:
        raise ValueError(f"kv_store.peer.token_file=auto: {reason}; name a file")
    path, new = folder / "token", folder / f"new-{secrets.token_hex(8)}"
    if not path.exists():
        new.touch(0o600)
        new.write_text(secrets.token_hex(32))
        try:
            path.hardlink_to(new)
        except FileExistsError:  # another engine was first
            pass
        finally:
            new.unlink()
    return path
