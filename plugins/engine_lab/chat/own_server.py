"""An engine that is there for one conversation."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from engine_lab.shared.signals import ends_cleanly

READY = re.compile(r"^ready: .* at (http://\S+)/v1$", re.MULTILINE)
PHASE = re.compile(r"^starting: (.+)$", re.MULTILINE)
POLL_S = 0.1
END_S = 10.0
MOST_BYTES = 1 << 20


class StartError(RuntimeError):
    """The engine ended before it was ready."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def own_server(words: Sequence[str], tell: Callable[[str], None]) -> Iterator[str]:
    """The URL of ``engine serve WORDS`` on a free port of this machine, which ends with the context. ``tell`` is called
    with each phase of its start. Raises :class:`StartError`."""
    command = [sys.executable, "-P", "-m", "engine.cli.main", "serve", *words, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile() as log, ends_cleanly():
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the plan
            stderr=log,
            process_group=0,  # Ctrl-C stops an answer, not the engine
        )
        try:
            yield _url(server, log, tell)
        finally:
            server.terminate()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _url(server: subprocess.Popen[bytes], log: IO[bytes], tell: Callable[[str], None]) -> str:
    while True:
        status = server.poll()
        # the server writes where the file ends: this leaves its position alone
        said = os.pread(log.fileno(), MOST_BYTES, 0).decode("utf-8", "replace")
        if found := READY.search(said):
            return found[1]
        if status is not None:
            raise StartError(PHASE.sub("", said).strip() or f"engine serve ended with exit code {status}", status)
        if phases := PHASE.findall(said):
            tell(phases[-1])
        time.sleep(POLL_S)
