"""Find a C++ compiler and build shared libraries with it. Imports no torch: ``engine check`` asks here too."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NAMES = ("c++", "g++")
"""Not clang++: it brings an OpenMP library of its own, and two teams of threads would fight for the same cores."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared")
"""``-fno-math-errno`` lets loops with square roots use vector instructions."""
PROBE = '#include <omp.h>\nextern "C" int probe() { return omp_get_max_threads(); }\n'
TIMEOUT_S = 300
NO_COMPILER = f"no C++ compiler with OpenMP (CXX or one of {', '.join(NAMES)}, on Linux)"
INCLUDE = Path(__file__).parent
REMEDY = "or choose what needs no compiling: execution=eager, another attention_kernel, another quantizer"


class NativeError(RuntimeError):
    """Kernels for this CPU cannot be built; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that builds OpenMP code for this machine."""

    command: tuple[str, ...]
    """The program and its leading arguments."""
    version: str
    """First line of ``--version``."""

    def build(self, source: Path) -> Path:
        """The shared library of ``source``, from the cache if it is there. Raises :class:`NativeError`."""
        headers = (*sorted(INCLUDE.glob("*.h")), *sorted(source.parent.glob("*.h")))
        texts = [path.read_bytes() for path in (source, *headers)]
        parts = (*texts, " ".join((*self.command, *FLAGS)).encode(), self.version.encode(), _processor())
        key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
        target = cache_folder() / f"{source.stem}-{key}.so"
        if not target.is_file():
            self._compile(source, target)
        return target

    def _compile(self, source: Path, target: Path) -> None:
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        try:
            command = [*self.command, *FLAGS, f"-I{INCLUDE}", str(source), "-o", unfinished]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode != 0:
                lines = "\n".join(done.stderr.strip().splitlines()[:10])
                raise NativeError(
                    f"{source.name} does not compile with {shlex.join(self.command)} ({self.version}): set CXX to "
                    f"another compiler, {REMEDY}. It says:\n{lines}"
                )
            os.replace(unfinished, target)  # whole or not at all: other processes may be looking
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeError(f"{shlex.join(self.command)} did not build {source.name}: {error}; {REMEDY}") from error
        finally:
            Path(unfinished).unlink(missing_ok=True)


@cache
def find_compiler() -> Compiler | str:
    """The compiler of this machine (``CXX`` if set), or the reason why there is none. Asked once per process."""
    if not sys.platform.startswith("linux"):
        return f"C++ kernels are built on Linux only, this is {platform.system()}"
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [[name] for name in NAMES]
    command = next((one for one in candidates if shutil.which(one[0]) is not None), None)
    if command is None:
        return f"no C++ compiler found (looked for {', '.join(one[0] for one in candidates)}): install g++, {REMEDY}"
    told = shlex.join(command)
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        build = [*command, *FLAGS, "-x", "c++", "-", "-o", os.devnull]
        probe = subprocess.run(build, input=PROBE, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{told} does not run: {error}"
    if probe.returncode != 0:
        why = next(iter(probe.stderr.strip().splitlines()), "no message")
        return f"{told} does not build OpenMP code: {why}"
    return Compiler(tuple(command), next(iter(version.splitlines()), "unknown version"))


def cache_folder() -> Path:
    """Where libraries are kept: ``$XDG_CACHE_HOME/engine/native``, ours alone, since what lies there is executed.

    A temporary folder of this process where that cannot be.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "engine" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid == os.getuid() and not writable_by_others and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="engine-native-"))


def _processor() -> bytes:
    """What ``-march=native`` depends on: home folders are shared between machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor().encode()
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(lines))).encode()
