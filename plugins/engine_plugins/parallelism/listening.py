"""Workers that connect by themselves: the engine process listens, each says a token and its rank first, and hears in a
line that it is welcome, or why not."""

from __future__ import annotations

import contextlib
import hmac
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.contracts.parallelism import TOKEN, WELCOME, LauncherError, StartedWorker, WorkerJob

GREETING_S = 5.0
"""How long somebody who connects may take to say the token."""
LONGEST_GREETING = 512
SAY_AFTER_S, SAY_EVERY_S = 10.0, 30.0
"""When it is said what is waited for."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A machine that is gone is noticed after some ten seconds."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class Joined:
    """See :class:`engine.contracts.parallelism.StartedWorker`. How it ends only its own machine knows."""

    rank: int
    connection: socket.socket
    place: str

    def ended(self) -> str | None:
        return None

    def kill(self) -> None:
        """It ends when its connection does."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Listener:
    """A port that workers join at."""

    def __init__(self, host: str, port: int, token: str) -> None:
        """Raises :class:`LauncherError` for an address that cannot be listened on."""
        self._token = token
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise LauncherError(
                f"workers cannot be waited for at parallelism.host={host} parallelism.port={port}: "
                f"{error.strerror or error}; give another address of this machine, or another port"
            ) from error
        self.host, self.port = self._socket.getsockname()[:2]

    def wait(
        self, jobs: Sequence[WorkerJob], timeout_s: float, waits: Callable[[Sequence[int]], None], what_to_do: str
    ) -> Sequence[StartedWorker]:
        """Until a worker has come for every job; ``waits`` is called with the ranks that are missing, again and again.
        What is waited for is said on stderr. Raises :class:`LauncherError` after ``timeout_s``."""
        joined: dict[int, Joined] = {}
        ends = time.monotonic() + timeout_s
        says = time.monotonic() + SAY_AFTER_S
        try:
            while missing := [job.rank for job in jobs if job.rank not in joined]:
                waits(missing)
                ranks, now = ", ".join(map(str, missing)), time.monotonic()
                if now > ends:
                    raise LauncherError(
                        f"no worker came for rank {ranks} within {timeout_s:.0f} s at {self.host}:{self.port}: "
                        f"{what_to_do}"
                    )
                if now > says:
                    says = now + SAY_EVERY_S
                    sys.stderr.write(
                        f"engine: still waiting for rank {ranks} at {self.host}:{self.port}, for another "
                        f"{ends - now:.0f} s: {what_to_do}\n"
                    )
                    sys.stderr.flush()
                for worker in self._accept(missing):
                    joined[worker.rank] = worker
        except BaseException:
            for worker in joined.values():
                worker.connection.close()
            raise
        return [joined[job.rank] for job in jobs]

    def close(self) -> None:
        self._socket.close()

    def _accept(self, missing: Sequence[int]) -> Iterator[Joined]:
        """Whoever comes within a moment and says the right thing."""
        self._socket.settimeout(0.5)
        try:
            connection, address = self._socket.accept()
        except TimeoutError:
            return
        wanted = self._greeted(connection)
        rank = missing[0] if wanted == -1 else wanted
        if rank is None or rank not in missing:
            why = f"its {TOKEN} is another one" if wanted is None else f"no worker is wanted for rank {rank}"
            sys.stderr.write(f"engine: somebody at {address[0]} was turned away: {why}\n")
            with contextlib.suppress(OSError):
                connection.sendall(f"{why}\n".encode())
            connection.close()
            return
        try:
            connection.sendall(f"{WELCOME}\n".encode())
        except OSError:
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        yield Joined(rank, connection, f"at {address[0]}")

    def _greeted(self, connection: socket.socket) -> int | None:
        """The rank that somebody with the token asks for, -1 for any; ``None``: they do not belong here."""
        said, ends = b"", time.monotonic() + GREETING_S
        try:
            while not said.endswith(b"\n") and len(said) < LONGEST_GREETING:
                connection.settimeout(max(0.001, ends - time.monotonic()))
                part = connection.recv(1)
                if not part:
                    return None
                said += part
            token, _, rank = said.decode().strip("\n").rpartition(" ")
            return int(rank) if hmac.compare_digest(token.encode(), self._token.encode()) else None
        except (OSError, ValueError):
            return None
