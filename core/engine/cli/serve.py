"""``engine serve``: assemble, print the plan, serve."""

from __future__ import annotations

import argparse
import shutil
import sys

from engine.assembly.compose import quoted
from engine.cli.command import report_failures
from engine.cli.commands import commands
from engine.contracts.command import Command

SHORTHANDS = {"model": "model.path", "host": "server.host", "port": "server.port"}


def shorthands(parser: argparse.ArgumentParser) -> None:
    """The flags of every subcommand that takes a configuration."""
    parser.add_argument("--model", metavar="PATH", help="short for model.path: bundled, a directory or a hub id")
    parser.add_argument("--host", help="short for server.host")
    parser.add_argument("--port", help="short for server.port")


def overrides_of(flags: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The overrides, the flags' ones last."""
    given = {key: getattr(flags, flag) for flag, key in SHORTHANDS.items()}
    return [*overrides, *(f"{key}={quoted(value)}" for key, value in given.items() if value is not None)]


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.assembly.assemble import configure, plan_for
    from engine.assembly.describe import describe
    from engine.service.joining import joining_of, work
    from engine.service.logs import keep_output

    keep_output()
    configured = configure(overrides_of(flags, overrides), flags.config_dir)
    report_failures(configured.discovered.failures)
    plan = plan_for(configured, download=True)
    if joining := joining_of(plan):
        return work(joining.address, joining.rank, joining.environment)
    print(describe(plan, width=shutil.get_terminal_size((110, 24)).columns, color=sys.stdout.isatty()), flush=True)
    from engine.grpc.opening import grpc_transport
    from engine.http.server import serve

    offers = commands(configured.discovered)
    beside = [found] if (found := grpc_transport(plan.settings.server)) is not None else []
    return serve(plan, {name: offer.provider for name, offer in offers.items() if offer.provider.finds}, beside)


COMMAND = Command("Start the OpenAI-compatible server.", _run, shorthands)
