"""What a sweep has found so far: plain data, saved after every run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = "engine-sweep/1"
SCREENING, FINAL, PROOF, HEADROOM = "screening", "final", "proof", "headroom"
"""Kinds of rounds."""


class Candidate(msgspec.Struct):
    """A plugin set."""

    id: int
    name: str
    """The overrides in which it differs from others."""
    words: tuple[str, ...]
    """All its overrides."""
    refused: str = ""
    """Why it is not measured, or no further."""
    same_as: int | None = None
    """Another one with the same plan, which is measured for both."""
    quality_key: str = ""
    """Equal for sets that store weights and KV alike."""
    loss: float | None = None
    """Relative increase of perplexity over the same model unquantized; ``None``: not measured."""
    predicted: float | None = None
    """By simulation, of the figure that sets are ordered by."""
    facts: dict[str, float | None] = {}
    """Memory in bytes, KV cache in tokens, as its engine says."""
    is_beside: bool = False
    """Not of the grid: measured to be compared with one of it."""


class Run(msgspec.Struct, frozen=True):
    """One run of the load against one set. The unit of all statistics."""

    candidate: int
    number: int
    """Of the pass: runs of one pass send the same requests."""
    figures: dict[str, float | None]
    """By key of :data:`engine_lab.sweep.figures.FIGURES`."""
    seconds: float
    """With the start of its engine."""
    failed: str = ""
    """Why it does not count: what the first request that failed was told."""
    client_lag_ms: float | None = None
    """99th percentile of how late the client's event loop woke."""


class Round(msgspec.Struct):
    """Sets that are measured together, each once a pass."""

    kind: str
    candidates: list[int]
    passes: int
    first: int
    """Number of its first pass."""
    scale: float = 1.0
    """How many times as much load as in others."""


class Experiment(msgspec.Struct):
    """Everything a report is made of."""

    words: tuple[str, ...]
    """As they were typed."""
    options: dict[str, Any]
    """What must not change between the parts of a sweep that was interrupted."""
    candidates: list[Candidate] = []
    schema: str = SCHEMA
    order: str = ""
    """Where the order of the first round is from."""
    quality: str = ""
    """On what quality was measured, or why it was not."""
    chars_per_token: float | None = None
    device: str = ""
    model: str = ""
    rounds: list[Round] = []
    runs: list[Run] = []
    elapsed_s: float = 0.0
    """Of all parts together."""
    summary: dict[str, Any] = {}
    """What the report shows, for other programs; made anew from the rest."""

    def able(self) -> list[Candidate]:
        """Those to measure, or that were."""
        return [one for one in self.candidates if not one.refused and one.same_as is None]

    def runs_of(self, candidate: int) -> dict[int, Run]:
        """By number of their pass; those that failed are not among them."""
        return {run.number: run for run in self.runs if run.candidate == candidate and not run.failed}


def load(file: Path) -> Experiment:
    """Raises ``ValueError`` if the file is none of :func:`save`."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Experiment)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{file}: expected what a sweep has saved; give another --folder ({error})") from error
    if found.schema != SCHEMA:
        raise ValueError(f"{file}: schema {found.schema!r}, expected {SCHEMA!r}; give another --folder")
    return found


def save(experiment: Experiment, file: Path) -> None:
    """Replaces the file at once, so that an interruption leaves the old one whole. Raises ``OSError``."""
    beside = file.with_suffix(".part")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(experiment), indent=1))
    os.replace(beside, file)
