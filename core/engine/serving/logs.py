"""Logging of the API process: one JSON object per line on stderr, control characters escaped."""

from __future__ import annotations

import logging
import sys

import structlog


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
