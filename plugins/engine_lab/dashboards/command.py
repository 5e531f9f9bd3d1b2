"""``engine dashboards``: its flags; it takes no overrides."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command

NOTES = """\
Import them in Grafana (10.4 or later), or have it provision the folder. Prometheus scrapes the engine at /metrics.
The rules of alerts are with engine alerts --rules."""


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="DIR", required=True, help="a folder, made if there is none")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.dashboards.main import run

    return run(flags.to)


COMMAND = Command(
    "Write Grafana dashboards of an engine's metrics.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
