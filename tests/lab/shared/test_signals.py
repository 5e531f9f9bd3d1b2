"""Commands that start engines end them when they are told to end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMMAND = """
import asyncio, sys
from engine_lab.shared.signals import ends_cleanly

async def climb():
    try:
        print("running", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        print("ending", flush=True)
        sys.stdin.readline()
        print("engines ended", flush=True)

with ends_cleanly():
    asyncio.run(climb())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_after_an_await_is_ended_before_the_command_ends(number: signal.Signals) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "running\n"
        process.send_signal(number)
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)  # `timeout` signals the process, then its group
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.read() == "engines ended\n"
        assert process.wait(30) == 128 + number
