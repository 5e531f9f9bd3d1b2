"""Which rank is to blame when several fail: one that failed by itself, not those that waited for it."""

from __future__ import annotations

import traceback

from engine.contracts.communicator import CommunicatorError


def waited(error: Exception) -> bool:
    """Whether a rank failed because another one did not come."""
    return isinstance(error, CommunicatorError)


def log_own(error: Exception) -> None:
    """Log what a rank did wrong itself, with its place in the code. Of one that waited for another the line with the
    engine's cause of death says enough."""
    if not waited(error):
        traceback.print_exception(error)
