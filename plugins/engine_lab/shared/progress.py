"""What a long command is doing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error: a line that changes on a terminal, and is seldom drawn, for it runs on the
    cores that are measured; else a line each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("starting", refresh_per_second=1) as line:
        yield line.update
