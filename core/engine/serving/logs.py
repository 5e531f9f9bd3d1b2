"""Logging of the API process: one JSON object per line on stderr, control characters escaped."""

from __future__ import annotations

import logging
import sys

import structlog


class _OneLine(logging.Handler):
    """What aiohttp itself has to say, as one line and without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        structlog.get_logger("engine.http").warning(str(record.msg)[:200], error=kind)


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
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
