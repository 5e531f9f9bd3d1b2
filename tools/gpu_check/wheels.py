"""Gather what a GPU machine without a network lacks: wheels for its version of Python, in one folder to carry there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_check.standalone import REPOSITORY

LACKING = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "structlog", "msgspec")
"""What images that have torch and transformers are known to lack."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def gather(folder: Path, python: str, names: Sequence[str] = LACKING) -> list[Path]:
    """The wheels of these projects, in the versions of ``constraints.txt``. ``python``: as ``3.12``.

    Raises ``ValueError`` for a project that has no wheel for that Python, and none for every Python can be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    binary = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    for name in names:
        if _pip("download", *binary, "-d", str(folder), name).returncode == 0:
            continue
        made = _pip("wheel", "-w", str(folder), name)
        if made.returncode or not list(folder.glob(f"{name.replace('-', '_')}-*-none-any.whl")):
            raise ValueError(f"{name}: no wheel for Python {python}, and none for every Python: {made.stderr[-300:]}")
    return sorted(folder.glob("*.whl"))


def _pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    constraints = str(REPOSITORY / "constraints.txt")
    words = [sys.executable, "-m", "pip", command, "-q", "--no-deps", "-c", constraints, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)
