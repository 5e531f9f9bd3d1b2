"""What was predicted and what came of it, a line of JSON each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from engine.native.folder import unusable, user_folder
from engine_lab.doctor.diagnosis import Finding
from engine_lab.doctor.evidence import Evidence
from engine_lab.shared.statistics import Estimate, wilson

SCHEMA = "engine-doctor-ledger/1"
HIT, LARGER, MISS, UNDECIDED = "hit", "larger", "miss", "undecided"
RIGHT_CAUSE = (HIT, LARGER)


class Entry(msgspec.Struct, frozen=True):
    """One prediction that was put to the test. Ratios are of the metric after the change / before."""

    at: str
    model: str
    device: str
    cause: str
    overrides: tuple[str, ...]
    metric: str
    predicted: tuple[float, float]
    measured: float
    interval: tuple[float, float] | None
    pairs: int
    outcome: str
    """``hit``: the estimate lies in the predicted range, and the whole interval below 1. ``larger``: the interval lies
    below the range: the right cause, and more came of it than predicted. ``miss``: the interval lies above the range.
    Else ``undecided``."""
    schema: str = SCHEMA
    change: str = ""
    """Of the load, where there were no overrides to try."""
    paid: tuple[str, ...] = ()
    """Classes of requests that waited longer for it, and how much."""


def entry_of(finding: Finding, evidence: Evidence, estimate: Estimate, paid: Sequence[str] = ()) -> Entry:
    remedy, interval = finding.remedy, estimate.interval
    if interval is not None and remedy.low <= estimate.value <= remedy.high and interval.high < 1.0:
        outcome = HIT
    elif interval is not None and interval.high < remedy.low:
        outcome = LARGER
    elif interval is not None and interval.low > remedy.high:
        outcome = MISS
    else:
        outcome = UNDECIDED
    return Entry(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        evidence.engine.model,
        evidence.engine.device,
        finding.rule.cause,
        remedy.overrides,
        finding.rule.metric,
        (remedy.low, remedy.high),
        estimate.value,
        None if interval is None else (interval.low, interval.high),
        estimate.n,
        outcome,
        change="" if remedy.overrides else remedy.change,
        paid=tuple(paid),
    )


def default_file() -> Path:
    """Raises ``ValueError`` where nothing can be kept."""
    folder = user_folder("doctor")
    if reason := unusable(folder):
        raise ValueError(f"{reason}; give --ledger FILE")
    return folder / "ledger.jsonl"


def append(file: Path, entry: Entry) -> None:
    """Raises ``OSError``."""
    with file.open("ab") as out:
        out.write(msgspec.json.encode(entry) + b"\n")


def read(file: Path) -> list[Entry]:
    """Empty without a file. Raises ``ValueError`` for a line of another kind."""
    if not file.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=Entry) for line in file.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"--ledger {file}: expected a file written by engine doctor --verify: {error}") from error


def score(entries: Sequence[Entry]) -> Iterable[str]:
    """Lines: the share of predictions that came true, of all and by cause."""
    if not entries:
        yield "no prediction was put to the test yet: engine doctor --verify"
        return
    for entry in entries:
        low, high = entry.interval or (float("nan"), float("nan"))
        yield (
            f"{entry.at}  {entry.outcome:9}  {entry.cause}: {entry.metric} x {entry.measured:.2f} "
            f"[{low:.2f}-{high:.2f}], predicted {entry.predicted[0]:.2f}-{entry.predicted[1]:.2f}"
        )
        if entry.outcome == LARGER:
            yield "  right cause, effect larger than predicted"
        yield from (f"  paid by {line}" for line in entry.paid)
    right = sum(entry.outcome in RIGHT_CAUSE for entry in entries)
    larger = sum(entry.outcome == LARGER for entry in entries)
    share = wilson(right, len(entries))
    undecided = sum(entry.outcome == UNDECIDED for entry in entries)
    yield (
        f"{right} of {len(entries)} named the right cause: {right / len(entries):.0%} "
        f"[{share.low:.0%}-{share.high:.0%}], {larger} of them with an effect larger than predicted; "
        f"{undecided} undecided"
    )
