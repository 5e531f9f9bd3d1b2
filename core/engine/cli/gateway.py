"""``engine gateway``: servers elsewhere behind one listener."""

from __future__ import annotations

import argparse

from engine.assembly.compose import quoted
from engine.cli.command import report_failures
from engine.contracts.command import Command

NOTES = """\
targets:
  http://HOST:PORT ...       as many as there are servers: of this engine, or of the OpenAI API
  targets=[URL,...]          the same, as part of a configuration (gateway.targets)"""


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="short for server.host")
    parser.add_argument("--port", help="short for server.port")


def _run(flags: argparse.Namespace, words: list[str]) -> int:
    from engine.assembly.gateway import gateway_parts

    given = {"server.host": flags.host, "server.port": flags.port}
    short = [f"{key}={quoted(value)}" for key, value in given.items() if value is not None]
    parts = gateway_parts([*words, *short], flags.config_dir)
    report_failures(parts.failures)
    from engine.http.gateway.server import serve_gateway

    return serve_gateway(parts.settings, parts.make_router, parts.exporters)


COMMAND = Command("Place requests among servers elsewhere, and pass their answers on.", _run, _flags, notes=NOTES)
