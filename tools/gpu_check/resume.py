"""Going on with a run that was cut off: what is in its report is not measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_check import registry
from gpu_check.conductor import Outcome
from gpu_check.section import Row, Section, write_rows


def outcomes_of(report: dict[str, Any]) -> list[Outcome]:
    """As they were when the report was written. Sections that there are no more are left out."""
    return [
        Outcome(
            registry.BY_NAME[name], found["status"], found["seconds"],
            tuple(Row(**row) for row in found["rows"]), found["reason"],
        )
        for name, found in report["sections"].items()
        if name in registry.BY_NAME
    ]  # fmt: skip


def still_to_run(sections: Sequence[Section], earlier: Iterable[Outcome], scratch: Path) -> tuple[Section, ...]:
    """Those that did not finish or in which something failed, and what they need, which the scratch folder of another
    run had. Rows that need not be measured again are put where :meth:`Context.has` finds them."""
    found = {outcome.section.name: outcome for outcome in earlier}
    missing = [s for s in sections if s.name not in found or not found[s.name].is_finished]
    for section in missing:
        if section.name in found:
            write_rows(scratch, section.name, [row for row in found[section.name].rows if row.is_done])
    wanted = {section.name for section in missing}.union(*(section.needs for section in missing))
    return tuple(section for section in sections if section.name in wanted)


def merged(earlier: Iterable[Outcome], later: Iterable[Outcome]) -> list[Outcome]:
    """Of both runs, in the order of the table. A section that was not started again keeps what it had."""
    found = {outcome.section.name: outcome for outcome in earlier}
    for outcome in later:
        had = found.get(outcome.section.name)
        if had is None or outcome.status != "not started":
            found[outcome.section.name] = outcome
    return [found[section.name] for section in registry.ALL if section.name in found]


def load(path: Path, device: str) -> dict[str, Any]:
    """The report of a run. Raises ``ValueError`` if it is none, or one of another device."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        name = report["device"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume {path}: not a report of gpu_check: {error}") from error
    if name != device:
        raise ValueError(f"--resume {path}: the report is of {name!r}, this device is {device!r}")
    return report
