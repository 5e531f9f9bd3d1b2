"""How a subcommand's words are told apart: flags by argparse, the rest are overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.assembly.errors import AssemblyError, nearest
from engine.contracts.command import USAGE, Command

OVERRIDES_HELP = """\
overrides (anywhere on the line):
  +preset=latency            start from a preset (+preset=[a,b] stacks them; the last one wins)
  drafter=ngram              take another plugin for a slot
  drafter.max_width=2        set one of its values
  exporter=[jsonl,console]   several, where a slot takes several
'engine plugins' lists the plugins, 'engine config' prints every key and its value."""


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"engine {name}",
        description=command.help,
        epilog="\n\n".join(filter(None, (command.notes, OVERRIDES_HELP * command.takes_overrides))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.takes_overrides:
        parser.add_argument(
            "--config-dir",
            action="append",
            default=[],
            type=Path,
            metavar="DIR",
            help="folder with your own presets and variants (may be repeated)",
        )
    try:
        command.flags(parser)
    except argparse.ArgumentError as error:
        raise AssemblyError([f"command {name}: {error}"]) from error
    wanted = "".join(f" {action.metavar or action.dest.upper()}" for action in positionals(parser))
    parser.usage = f"engine {name}{wanted} [--flags]" + " [overrides]" * command.takes_overrides
    return parser


def run(name: str, command: Command, argv: Sequence[str]) -> int:
    """Parse the words after ``engine NAME`` and run the command; its exit code."""
    parser = parser_of(name, command)
    flags, rest = parser.parse_known_args(list(argv))
    for word in rest:
        if word.startswith("-"):
            parser.error(f"no such flag {word.partition('=')[0]}{nearest(word.partition('=')[0], options(parser))}")
        if not command.takes_overrides:
            flag = f"; did you mean --url {word}?" if "://" in word and "--url" in options(parser) else ""
            parser.error(f"unexpected {word!r}{flag}")
    code = command.run(flags, rest)
    if not isinstance(code, int):
        raise AssemblyError([f"command {name} returned {code!r}, expected an exit code"])
    return code


def options(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag a parser knows."""
    return [option for action in parser._actions for option in action.option_strings]


def positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a parser wants without a flag."""
    return [action for action in parser._actions if not action.option_strings]


class _Parser(argparse.ArgumentParser):
    """One line on wrong usage, in the same form as every other message."""

    def error(self, message: str) -> NoReturn:
        print(f"engine: {message} ('{self.prog} --help' lists the flags)", file=sys.stderr)
        raise SystemExit(USAGE)


def report_failures(failures: Sequence[object]) -> None:
    """Plugins that are installed but broken: never silent, never in the way."""
    for failure in failures:
        print(f"engine: warning: {failure}", file=sys.stderr)
