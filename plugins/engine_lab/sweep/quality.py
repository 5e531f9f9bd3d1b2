"""What each set loses in quality, by ``engine eval`` in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from engine.assembly.assemble import configure
from engine.assembly.model_config import BUNDLED
from engine_lab.sweep.options import SweepOptions
from engine_lab.sweep.record import Candidate, Experiment

TOKENS = 4096


class QualityError(ValueError):
    """``engine eval`` did not judge a set; the message is what it said."""


async def measure_quality(
    experiment: Experiment, options: SweepOptions, saved: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Each way of storing weights and KV is judged once, where sets differ in it or a limit is given; sets that lose
    more than ``--quality`` are refused."""
    able = experiment.able()
    groups: dict[str, list[Candidate]] = {}
    for one in able:
        groups.setdefault(one.quality_key, []).append(one)
    if not options.quality:
        experiment.quality = "not measured (--no-quality)"
        return
    if len(groups) == 1 and options.max_loss is None:
        experiment.quality = "not measured: all sets store weights and KV alike"
        return
    for members in groups.values():
        if members[0].loss is not None or members[0].refused:
            continue
        say(f"quality: {members[0].name}")
        started = asyncio.get_running_loop().time()
        try:
            found, experiment.quality = await loss_of(members[0], options)
        except QualityError as error:
            _refuse(members, options, f"its loss of quality is not known: {error}")
            experiment.quality = experiment.quality or f"not measured of every set: {error}"
        else:
            for one in members:
                one.loss = found
            if options.max_loss is not None and found > options.max_loss:
                _refuse(members, options, f"loses {found:.2%} (perplexity); --quality allows {options.max_loss:.2%}")
        experiment.elapsed_s += asyncio.get_running_loop().time() - started
        saved()


def _refuse(members: list[Candidate], options: SweepOptions, reason: str) -> None:
    if options.max_loss is not None:
        for one in members:
            one.refused = reason


async def loss_of(candidate: Candidate, options: SweepOptions) -> tuple[float, str]:
    """Relative increase of perplexity, 0 at least, and on what. Raises :class:`QualityError`."""
    text = options.quality_text or _default_text(candidate, options)
    with TemporaryDirectory(prefix="engine-sweep-") as folder:
        file = Path(folder, "eval.json")
        words: list[str] = ["eval", *candidate.words, "--json", str(file), "--tokens", str(TOKENS)]
        words += [word for path in options.config_dirs for word in ("--config-dir", str(path))]
        words += ["--text", text] if text else []
        command = (sys.executable, "-P", "-m", "engine.cli.main", *words)
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await child.communicate()
        except BaseException:
            child.kill()
            await child.wait()
            raise
        if child.returncode or not file.exists():
            lines = said.decode(errors="replace").strip().splitlines()
            raise QualityError(lines[-1] if lines else f"engine eval ended with status {child.returncode}")
        report: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    (row,) = [row for row in report["rows"] if not row["is_reference"]]
    return max(0.0, row["perplexity_increase"]), report["source"]


def _default_text(candidate: Candidate, options: SweepOptions) -> str | None:
    """The topics of Python's manual, which every Python has; ``None`` for the bundled model, of which ``engine eval``
    has a text of its own."""
    if configure(candidate.words, options.config_dirs).composed.settings.model.path == BUNDLED:
        return None
    found = find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise QualityError("there is no text to score: give one with --quality-text")
    return found.origin
