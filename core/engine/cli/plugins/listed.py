"""``engine plugins``: what is installed, where it comes from, and what is broken."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from typing import Any

from engine.assembly.compose import AUTO
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.cli.commands import TWO_WORDS, commands
from engine.contracts.command import OK, Command
from engine.contracts.slots import SLOTS


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.assembly.assemble import configure

    check_words(overrides)

    configured = configure(overrides, flags.config_dir)
    found = configured.discovered
    selected = {
        (slot, name)
        for slot, picks in configured.composed.selections.items()
        for pick in picks
        for name in (pick.candidates if pick.plugin == AUTO else (pick.plugin,))
    }
    rows = [
        {
            "slot": slot,
            "name": offer.name,
            "selected": (slot, offer.name) in selected or (slot, offer.qualified) in selected,
            "origin": str(offer.origin),
            "provides": list(offer.provider.provides),
            "doc": offer.provider.doc,
        }
        for slot in SLOTS
        for offer in found.of_slot(slot)
    ]
    offered = [
        {"name": name, "origin": str(offer.origin), "doc": offer.provider.doc}
        for name, offer in commands(found).items()
        if offer in found.commands
    ]
    failures = [str(failure) for failure in found.failures]
    off = [str(origin) for origin in found.switched_off]
    if flags.json:
        print(json.dumps({"plugins": rows, "commands": offered, "failures": failures, "switched_off": off}, indent=2))
    else:
        _print(rows, offered, failures, off)
    return OK


def check_words(words: list[str]) -> None:
    """Raises :class:`AssemblyError` for words that look like a command, not like an override."""
    known = [provider.name.partition(" ")[2] for provider in TWO_WORDS]
    for word in words:
        if re.fullmatch(r"[\w.:-]+", word):
            near = nearest(word, known) or f" (commands: {listing(known)}; overrides are KEY=VALUE)"
            after = "; it comes right after 'engine plugins'" if word in known else near
            raise AssemblyError([f"engine plugins has no command {word!r} here{after}"])


def _print(rows: list[dict[str, Any]], offered: list[dict[str, str]], failures: list[str], off: list[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("slot", "plugin", "from"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it does", overflow="fold")
    last = ""
    for row in rows:
        mark = " *" if row["selected"] else ""
        table.add_row(row["slot"] if row["slot"] != last else "", row["name"] + mark, row["origin"], row["doc"])
        last = row["slot"]
    for i, row in enumerate(offered):
        table.add_row("" if i else "(command)", row["name"], row["origin"], row["doc"])
    Console(width=shutil.get_terminal_size((120, 24)).columns, highlight=False).print(table)
    print("* selected by this configuration (or a candidate of auto)")
    for line in off:
        print(f"switched off: {line}")
    for line in failures:
        print(f"broken: {line}", file=sys.stderr)


COMMAND = Command(
    "List the installed plugins, their origin, and what failed to load; or do something with one of them.",
    _run,
    _flags,
    notes="commands:\n"
    + "\n".join(f"  engine {provider.name:<14} {provider.doc}" for provider in TWO_WORDS)
    + "\n'engine plugins COMMAND --help' tells more.",
)
