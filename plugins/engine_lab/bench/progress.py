"""How far a run is: a bar on a terminal, a line every few seconds into a pipe. Both on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine_lab.bench.load import OnDone
from engine_lab.bench.record import RequestRecord

EVERY_S = 10.0
"""Between two lines."""


@contextmanager
def requests_done(load: str, total: int | None) -> Iterator[OnDone]:
    """Requests done, and how many failed. ``total``: how many there will be, where that is known."""
    if not sys.stderr.isatty():
        yield _Lines(load, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        task = bar.add_task(load, total=total)

        def on_done(record: RequestRecord) -> None:
            nonlocal failed
            failed += bool(record.error)
            bar.update(task, advance=1, description=f"{load}, {failed} failed" if failed else load)

        yield on_done


class _Lines:
    def __init__(self, load: str, total: int | None) -> None:
        self._load, self._total = load, total
        self._done = self._failed = 0
        self._started_s = self._told_s = time.monotonic()

    def __call__(self, record: RequestRecord) -> None:
        self._done += 1
        self._failed += bool(record.error)
        now = time.monotonic()
        if now - self._told_s >= EVERY_S:
            self._told_s = now
            of = "" if self._total is None else f" of {self._total}"
            failed = f", {self._failed} failed" if self._failed else ""
            print(f"{self._load}: {self._done}{of} done{failed}, {now - self._started_s:.0f} s", file=sys.stderr)
