"""``engine batch run``: answer a file of requests without a server."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from engine.assembly.compose import quoted
from engine.cli.command import report_failures
from engine.contracts.command import USAGE, Command


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("run",), metavar="run")
    parser.add_argument("file", type=Path, metavar="FILE", help="the requests, one JSON object a line")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the answers, in that order")
    parser.add_argument("--model", metavar="PATH", help="short for model.path: bundled, a directory or a hub id")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.assembly.assemble import configure, plan_for
    from engine.service.logs import keep_output

    file, output = flags.file.absolute(), flags.output.absolute()
    folder = output.with_name(output.name + ".batch")
    for wrong, message in (
        (not file.is_file(), f"{flags.file}: there is no such file"),
        (not output.parent.is_dir(), f"-o {flags.output}: there is no folder {output.parent}"),
        (
            output.exists() and not folder.exists(),
            f"-o {flags.output}: there is such a file; remove it",
        ),
    ):
        if wrong:
            print(f"engine: {message}", file=sys.stderr)
            return USAGE
    keep_output()
    words = [*overrides, *([f"model.path={quoted(flags.model)}"] if flags.model is not None else [])]
    configured = configure(words, flags.config_dir)
    report_failures(configured.discovered.failures)
    plan = plan_for(configured, download=True)
    from engine.http.batch_run import run_batch

    batches = dataclasses.replace(
        plan.settings.batches,
        path=str(folder),
        quiet_s=0.0,
        max_in_flight=plan.settings.batches.max_in_flight or plan.scheduler.max_requests * plan.settings.fleet.replicas,
        max_file_bytes=2**63 - 1,
        max_lines=2**31 - 1,
    )
    settings = dataclasses.replace(plan.settings, batches=batches)
    return run_batch(dataclasses.replace(plan, settings=settings), file, output)


COMMAND = Command(
    "Answer a file of requests without a server, as POST /v1/batches would.",
    _run,
    _flags,
    notes="What is done is kept in OUT.batch until all is: the same line goes on from there, whatever ended it. Lines "
    "that an error answers are in OUT.errors.",
)
