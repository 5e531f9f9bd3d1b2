"""Which engine answers: one that runs, or one of this conversation's own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from engine_lab.chat.own_server import own_server

LOOK_S = 2.0


def listens(url: str) -> bool:
    """Whether there is a server at all."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), LOOK_S).close()
    except OSError:
        return False
    return True


def words(flags: Any, overrides: list[str]) -> list[str]:
    """What ``engine serve`` is to be given."""
    model = ["--model", flags.model] if flags.model else []
    return [*(word for folder in flags.config_dir for word in ("--config-dir", str(folder))), *model, *overrides]


@contextlib.contextmanager
def started(words: list[str], console: Console) -> Iterator[str]:
    """The URL of an engine of its own; the phases of its start are shown meanwhile."""
    said = f"engine serve {' '.join(words)}".strip()
    with contextlib.ExitStack() as stack:
        with console.status(f"starting '{said}'") as status:
            url = stack.enter_context(own_server(words, lambda phase: status.update(f"starting '{said}': {phase}")))
        yield url
