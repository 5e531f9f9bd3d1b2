"""``engine check``: would this configuration start?"""

from __future__ import annotations

import argparse
import shutil
import sys

from engine.cli.command import report_failures
from engine.cli.serve import overrides_of, shorthands
from engine.contracts.command import OK, Command


def _flags(parser: argparse.ArgumentParser) -> None:
    shorthands(parser)
    parser.add_argument(
        "--build",
        action="store_true",
        help="also build the selected plugins and see whether the model fits into memory",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.assembly.assemble import configure, plan_for

    configured = configure(overrides_of(flags, overrides), flags.config_dir)
    report_failures(configured.discovered.failures)
    plan = plan_for(configured)
    from engine.service.start_check import check_files, try_plan

    notes = check_files(plan)
    if flags.json:
        print(plan.to_json().decode())
    else:
        from engine.assembly.describe import describe

        print(describe(plan, width=shutil.get_terminal_size((110, 24)).columns, color=sys.stdout.isatty()), end="")
        if plan.layout.size > 1:
            from engine.service.start_check import describe_placement

            print(describe_placement(plan))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if flags.build:
        print(try_plan(plan), file=sys.stderr)
    return OK


COMMAND = Command("Resolve a configuration against model and device, without reading a weight.", _run, _flags)
