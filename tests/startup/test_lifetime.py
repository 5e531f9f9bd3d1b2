"""No process outlives the one that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import os, sys
from engine.startup.lifetime import end_with
end_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
while True:
    pass
"""
PARENT = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid())])"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends children with their parent")
def test_a_child_that_is_busy_ends_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    child = Path("/proc") / parent.stdout.readline().decode().strip()
    assert child.exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not child.exists():
            return
        time.sleep(0.05)  # until the kernel gets to it; bounded
    os.kill(int(child.name), signal.SIGKILL)
    raise AssertionError("the child is still there")


def test_a_child_whose_parent_is_gone_already_ends():
    ended = subprocess.run([sys.executable, "-c", CHILD, "1"], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")
