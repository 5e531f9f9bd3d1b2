"""A child process ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def end_with(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends, and with it when ``parent`` ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)
