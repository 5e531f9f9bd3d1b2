"""``engine kv``: its words and flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os
import sys

from engine.contracts.command import USAGE, Command
from engine_plugins.kv_store.command.words import FORMS, parse

NOTES = f"""\
{chr(10).join(f"engine kv {' '.join((action, *form))}" for action, form in FORMS.items())}

ls       the namespaces of a folder: model, records, bytes, when they were last used
stats    whether the stores of a server pay, and which bound is next; without a URL: what is in a folder
verify   reads every file and says which are damaged; --remove removes them
export   one file with the records of a namespace, or of all; the last used first
import   takes the records of such a file, as far as --max-bytes goes. A checksum shows damage, not intent: whoever
         wrote the file decides what your prompts are continued with. Take none from people whom you do not trust so far
clear    removes every byte of a namespace, or of all
warm     sends the prompts of a file to a server (http://127.0.0.1:8000), twice, so that its stores have them: a prompt
         a line, or JSON: {{"prompt": ...}}, {{"messages": [...]}} or a list of messages

NAMESPACE is as much of its name as tells it from others. A running engine goes on with what it has in memory.
Exit status: 0 done, 1 failed, refused or damaged, 2 wrong usage."""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar=f"{'|'.join(FORMS)} ...", help="what to do: see below")
    add("--path", metavar="FOLDER", default="auto", help="as kv_store.disk.path (auto: the user's cache)")
    add("--max-bytes", type=int, metavar="N", default=16 * 1024**3, help="as kv_store.disk.max_bytes (16 GiB)")
    add("--remove", action="store_true", help="verify: remove what is damaged")
    add("--engine", metavar="ID", help="stats: of several engines this one")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--json", action="store_true", help="ls, stats: print JSON, not a table")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    try:
        asked = parse(flags.words)
    except ValueError as error:
        print(f"engine kv: {error}", file=sys.stderr)
        return USAGE
    from engine_plugins.kv_store.command.main import run

    return run(asked, flags)


COMMAND = Command(
    "Show, check, carry and remove what KV stores keep on a disk; whether they pay.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
