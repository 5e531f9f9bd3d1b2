"""Holds connections in a process of its own, which has file descriptors of its own.

``with Holder(target, data, count): ...`` opens so many, sends ``data`` on each and closes them at the end. ``slowly``:
one byte a second of each answer is read, into a small receive buffer; else nothing is.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys

from tools.attack.client import ROOT, Address

RECEIVE_BUFFER = 4096


class Holder:
    def __init__(self, target: Address, data: bytes, count: int, *, slowly: bool = False) -> None:
        self._arguments = [target.host, str(target.port), str(count), str(int(slowly))]
        self._data = data

    def __enter__(self) -> Holder:
        command = [sys.executable, "-m", "tools.attack.holder", *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"%d\n" % len(self._data) + self._data)
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise SystemExit("error: the connections could not be opened")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main(host: str, port: str, count: str, slowly: str) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    # Unbuffered: poll must see what is left in stdin.
    stdin, size, data = sys.stdin.fileno(), b"", b""
    while not size.endswith(b"\n"):
        size += os.read(stdin, 1)
    while len(data) < int(size):
        data += os.read(stdin, int(size) - len(data))
    held = [_opened(host, int(port), data, small=slowly == "1") for _ in range(int(count))]
    print("held", flush=True)
    end = select.poll()
    end.register(stdin)
    while not end.poll(1000):
        if slowly == "1":
            for connection in held:
                _read_one(connection)


def _opened(host: str, port: int, data: bytes, small: bool) -> socket.socket:
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    connection.connect((host, port))
    connection.sendall(data)
    connection.setblocking(False)
    return connection


def _read_one(connection: socket.socket) -> None:
    try:
        connection.recv(1)
    except OSError:
        pass  # nothing there yet, or the server has closed it


if __name__ == "__main__":
    main(*sys.argv[1:])
