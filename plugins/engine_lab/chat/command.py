"""``engine chat``: its flags; overrides are for an engine of its own."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import Command

NOTES = """\
Without --url it talks to the engine at http://127.0.0.1:8000. If there is none, or with --model or overrides, it starts
one of its own on a free port, as 'engine serve' does, and ends it when you leave.
With stdin from a pipe it answers what it reads there, prints the answer alone and ends.
Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D leaves. /help lists the commands."""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", help="a running engine")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--model", metavar="PATH", help="as in 'engine serve': bundled, a directory or a hub id")
    add("--system", metavar="TEXT", default="", help="system prompt; /system changes it")
    add("--params", metavar="N=V", default="", help="fields of each request, as 'temperature=0 seed=1'; /params, too")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.chat.main import run

    return run(flags, overrides)


COMMAND = Command("Chat with an engine in the terminal.", _run, _flags, notes=NOTES)
