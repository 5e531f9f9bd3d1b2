"""The rows of a sweep as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

from engine_lab.sweep.record import Experiment

PLAIN = ("id", "name", "status", "reason", "runs", "memory", "loss", "pareto")


def write_csv(experiment: Experiment, file: Path) -> None:
    """A line for each set, in the order of the report. Raises ``OSError``."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        keys = experiment.summary["figures"]
        writer.writerow([*PLAIN, *keys, "overrides"])
        for row in experiment.summary["rows"]:
            figures = ["" if row["figures"][key] is None else f"{row['figures'][key]:.6g}" for key in keys]
            writer.writerow([*(row[key] for key in PLAIN), *figures, " ".join(row["overrides"])])
