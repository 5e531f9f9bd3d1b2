"""Logging of the API process: one JSON object per line on stderr, control characters escaped."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import structlog

from engine.startup.output import keep_output

__all__ = ["Repeated", "configure", "echoed_id", "http_logger", "keep_output", "on_loop_error"]

EVERY_S = 60.0
"""Seconds between two lines about the same repeated error."""
_SAFE_ID = re.compile(r"[^A-Za-z0-9._:\-]")


def echoed_id(sent: str) -> str:
    """The client's own id without anything that could confuse a log, or a new one. It identifies nothing here."""
    return _SAFE_ID.sub("", sent)[:128] or uuid.uuid4().hex


class Repeated:
    """An error that clients can cause as often as they like: one line a minute, with how many there were."""

    def __init__(self, event: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._clock = clock
        self._count = 0
        self._next_s = clock()

    def warning(self, **fields: Any) -> None:
        """Note one, with what is known about it."""
        self._count += 1
        now = self._clock()
        if now >= self._next_s:
            structlog.get_logger("engine.http").warning(self._event, count=self._count, **fields)
            self._count, self._next_s = 0, now + EVERY_S


class _OneLine(logging.Handler):
    """What aiohttp itself has to say, as one line and without a traceback; the same thing once a minute."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._known: dict[str, Repeated] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        # The text without its arguments: there are as many of these as places that log.
        said = str(record.msg)[:200]
        self._known.setdefault(said, Repeated(said)).warning(error=kind)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For ``loop.set_exception_handler``: what asyncio itself has to say, once a minute each."""
    # The first words say what it is; after them may come addresses.
    said, error = " ".join(str(context.get("message", "no message")).split()[:4]), context.get("exception")
    _LOOP_ERRORS.setdefault(said, Repeated(said)).warning(error=type(error).__name__ if error else None)


_LOOP_ERRORS: dict[str, Repeated] = {}


def http_logger() -> logging.Logger:
    """The logger to give to aiohttp's runner."""
    logger = logging.getLogger("engine.http")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(_OneLine(logging.WARNING))
    return logger


def configure() -> None:
    """Called once by the process that serves, never on import."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
