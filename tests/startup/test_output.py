"""Output that nobody can take costs a server nothing but that output."""

import os
import subprocess
import sys

import pytest
import structlog

from engine.startup.output import Unfailing

CHILD = """
import os, sys, tempfile
from engine.startup.output import keep_output
keep_output()
opened = tempfile.TemporaryFile()
assert opened.fileno() > 2, "a file took the place of stderr"
assert all(os.get_inheritable(fd) for fd in range(3)), "the engine process has none of them"
print("a plan", flush=True)
print("a line", file=sys.stderr, flush=True)
os._exit(7) if sys.stdout.isatty() else None
"""


@pytest.mark.parametrize("redirected", ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_process_starts_and_ends_well_whatever_becomes_of_its_output(redirected):
    run = ["bash", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, CHILD]
    done = subprocess.run(run, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout == "a plan\n") == (">&-" not in redirected.replace("2>&-", "") and "full" not in redirected)


def test_a_reader_who_does_not_read_keeps_nobody_waiting():
    reading, writing = os.pipe()
    stream = Unfailing(open(writing, "w"))  # noqa: SIM115 (the pipe stays open)
    sent = "".join(f"line {i}\n" for i in range(100_000))  # a megabyte; a pipe holds 64 KiB
    assert stream.write(sent) == len(sent)
    assert stream.write("lost\n") == 5
    stream.flush()
    read = os.read(reading, 2**20).decode()
    assert len(read) > 2**15 and sent.startswith(read)
    stream.write("taken again\n")
    assert os.read(reading, 2**20) == b"\ntaken again\n", "after a line that was cut"


def test_a_terminal_that_nobody_reads_keeps_nobody_waiting():
    """It can be written to long before it takes all of what is written."""
    master, terminal = os.openpty()
    stream = Unfailing(open(terminal, "w"))  # noqa: SIM115 (the terminal stays open)
    sent = "".join(f"line {i}\n" for i in range(10_000))
    assert stream.write(sent) == len(sent)
    read = os.read(master, 2**20).decode().replace("\r\n", "\n")
    assert read and sent.startswith(read)


@pytest.mark.parametrize("close", [False, True])
def test_a_log_line_that_cannot_be_written_raises_nothing(close):
    stream = open("/dev/full", "w")  # noqa: SIM115 (closing it fails, too)
    if close:
        with pytest.raises(OSError):
            stream.write("x" * 100_000)
            stream.close()
    log = structlog.WriteLogger(Unfailing(stream))
    for _ in range(100):
        log.msg("x" * 1000)
