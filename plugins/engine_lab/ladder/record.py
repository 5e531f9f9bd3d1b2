"""What a ladder has found so far: plain data, saved after every pair of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from engine_lab.ladder.comparisons import Comparison
from engine_lab.ladder.rungs import Rung, Words

SCHEMA = "engine-ladder/1"


class Run(msgspec.Struct, frozen=True):
    """One run of the workload. The unit of all statistics."""

    figures: dict[str, float | None]
    """By key of :data:`engine_lab.ladder.figures.FIGURES`."""
    requests: int
    failed: int
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    acceptance: float | None
    """Share of drafts that were accepted; ``None`` without drafts."""
    client_lag_ms: float | None
    """99th percentile of how late the client's event loop woke."""
    new_tokens: float | None = None
    """Median over requests of the prompt tokens that were not cached."""


class Output(msgspec.Struct, frozen=True):
    """A greedy answer."""

    text: str
    tokens: list[str]
    margins: list[float]
    """Of each token, by how many nats it was likelier than the next."""


class Baseline(msgspec.Struct, frozen=True):
    """What the engine of the baseline runs on and with."""

    device: str
    kind: str
    """``cpu``, ``cuda``"""
    dtype: str
    parameters: float | None
    """Those that multiply every token, by the bytes of the weights; ``None`` if they are quantized."""


class Survey(msgspec.Struct):
    """One rung of the cumulative ladder, started once before any comparison. That of the baseline has no name."""

    rung: str
    words: Words
    refused: str = ""
    """Why the engine does not start so; such a rung is left out of everything above it."""
    facts: dict[str, float | None] = {}
    """Memory in bytes, KV cache in tokens, as the engine says."""
    outputs: list[Output] = []


class Measured(msgspec.Struct):
    """A comparison and its pairs of runs so far."""

    kind: str
    name: str
    before: Words
    after: Words
    pairs: list[tuple[Run, Run]] = []
    """(before, after), whichever ran first."""
    refused: str = ""

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.kind, self.name, self.before, self.after)


class Ladder(msgspec.Struct):
    """Everything a report is made of."""

    base: Words
    rungs: list[Rung]
    options: dict[str, Any]
    """What must not change between the parts of a ladder that was interrupted."""
    schema: str = SCHEMA
    floor: dict[str, Any] | None = None
    """What ``engine bench-machine`` said."""
    model: str = ""
    engine: Baseline | None = None
    chars_per_token: float | None = None
    output_lengths: list[int] = []
    """Observed with the baseline."""
    surveys: list[Survey] = []
    comparisons: list[Measured] = []
    summary: dict[str, Any] = {}
    """What the report shows, written for other programs; made anew from the rest."""


def load(path: str) -> Ladder:
    """Raises ``ValueError`` if the file is none of :func:`save`."""
    try:
        ladder = msgspec.json.decode(Path(path).read_bytes(), type=Ladder)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"--resume {path}: expected a file written by engine ladder --json: {error}") from error
    if ladder.schema != SCHEMA:
        raise ValueError(f"--resume {path}: schema {ladder.schema!r}, expected {SCHEMA!r}")
    return ladder


def save(ladder: Ladder, path: str) -> None:
    """Replaces the file at once, so that an interruption leaves the old one whole. Raises ``OSError``."""
    beside = Path(f"{path}.part")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(ladder), indent=1))
    os.replace(beside, path)
