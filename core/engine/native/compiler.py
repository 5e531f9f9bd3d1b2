"""Find a C++ compiler and build shared libraries with it. Imports no torch: ``engine check`` asks here too."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engine.native.file_cache import remembered
from engine.native.scratch import scratch_folder

NAMES = ("c++", "g++")
"""Not clang++: it brings an OpenMP library of its own, and two teams of threads would fight for the same cores."""
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared", "-Wl,-z,defs")
"""``-fno-math-errno`` lets loops with square roots use vector instructions; with ``-z defs`` a missing symbol fails the
build, not the load."""
PROCESSOR = "-march="
"""``native``, unless the command names another: ``CXX="g++ -march=haswell"`` gives up what newer processors have."""
PROBE = """
#include <omp.h>
#include <vector>
extern "C" int probe() { return static_cast<int>(std::vector<int>(omp_get_max_threads()).size()); }
"""
TIMEOUT_S = 300
INCLUDE = Path(__file__).parent
INSTEAD = "or choose what needs no compiling: execution=eager, another attention_kernel, another quantizer"


class NativeError(RuntimeError):
    """Kernels for this CPU cannot be built; the message says why and what to do."""


class Source(NamedTuple):
    """What a library is compiled of."""

    file: Path
    macros: tuple[str, ...] = ()
    """``NAME=VALUE`` each: one file is several libraries where a process needs some of its templates only."""

    @property
    def name(self) -> str:
        """``float_linear.bfloat16``"""
        return ".".join((self.file.stem, *(macro.partition("=")[2] for macro in self.macros)))


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that builds OpenMP code for this machine."""

    command: tuple[str, ...]
    """The program and its leading arguments."""
    version: str
    """First line of ``--version``."""

    @property
    def build(self) -> tuple[str, ...]:
        """The command that builds a library."""
        named = any(argument.startswith(PROCESSOR) for argument in self.command)
        return (*self.command, *(() if named else (f"{PROCESSOR}native",)), *FLAGS)

    def key(self, source: Source) -> str:
        """Of everything that a library of ``source`` follows from."""
        headers = (*sorted(INCLUDE.glob("*.h")), *sorted(source.file.parent.glob("*.h")))
        texts = [path.read_bytes() for path in (source.file, *headers)]
        command = " ".join((*self.build, *source.macros))
        parts = (*texts, command.encode(), self.version.encode(), _processor())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]

    def compile(self, source: Source) -> bytes:
        """The shared library of ``source``. Raises :class:`NativeError`."""
        try:
            with scratch_folder(Path(tempfile.gettempdir())) as folder:
                return self._compile(source, Path(f"/proc/{os.getpid()}/fd/{folder}"))
        except (OSError, subprocess.TimeoutExpired) as error:
            command = shlex.join(self.command)
            raise NativeError(f"{command} did not build {source.file.name}: {error}; {INSTEAD}") from error

    def _compile(self, source: Source, folder: Path) -> bytes:
        library = folder / "library.so"
        macros = (f"-D{macro}" for macro in source.macros)
        command = [*self.build, f"-I{INCLUDE}", *macros, str(source.file), "-o", str(library)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "TMPDIR": str(folder)},
            umask=0o077,
        )
        if done.returncode != 0:
            lines = "\n".join(done.stderr.strip().splitlines()[:10])
            raise NativeError(
                f"{source.file.name} does not compile with {shlex.join(self.command)} ({self.version}): set CXX to "
                f"another compiler, {INSTEAD}. It says:\n{lines}"
            )
        return library.read_bytes()


@cache
def find_compiler() -> Compiler | str:
    """The compiler of this machine (``CXX`` if set), or the reason why there is none. Asked once per process."""
    if not sys.platform.startswith("linux"):
        return f"C++ kernels are built on Linux only, this is {platform.system()}"
    try:
        wanted = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        return f"CXX={os.environ['CXX']} is not a command line: {error}"
    candidates = [wanted] if wanted else [[name] for name in NAMES]
    command = next((one for one in candidates if shutil.which(one[0]) is not None), None)
    if command is None:
        return f"no C++ compiler found (looked for {', '.join(one[0] for one in candidates)}): install g++, {INSTEAD}"
    try:
        return Compiler(tuple(command), _version(command))
    except _Unfit as why:
        return f"{shlex.join(command)} {why}"


class _Unfit(Exception):
    """Why a compiler cannot be used."""


def _version(command: list[str]) -> str:
    """First line of ``--version``, once it has built a program: kept for the next start, as long as the programs that
    the command names are the same files. Raises :class:`_Unfit`."""
    programs = (Path(path).resolve() for path in map(shutil.which, command) if path is not None)
    states = ((str(path), (status := path.stat()).st_size, status.st_mtime_ns, status.st_ino) for path in programs)
    parts = (*map(str, states), *command, *FLAGS, PROBE)
    key = hashlib.sha256("\0".join(parts).encode() + _processor()).hexdigest()[:32]
    return remembered(f"compiler-{key}.txt", lambda: _tried(command).encode()).decode()


def _tried(command: list[str]) -> str:
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        compiler = Compiler(tuple(command), next(iter(version.splitlines()), "unknown version"))
        build = [*compiler.build, "-x", "c++", "-", "-o", os.devnull]
        probe = subprocess.run(build, input=PROBE, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise _Unfit(f"does not run: {error}") from error
    if probe.returncode != 0:
        why = next(iter(probe.stderr.strip().splitlines()), "no message")
        raise _Unfit(f"does not build OpenMP code: {why}")
    return compiler.version


def _processor() -> bytes:
    """What ``-march=native`` depends on: home folders are shared between machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor().encode()
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(lines))).encode()
