"""What a subcommand is, and how its words are told apart: flags by argparse, the rest are overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine.assembly.errors import nearest

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes: done, went wrong, asked wrongly."""

OVERRIDES_HELP = """\
overrides (anywhere on the line):
  +preset=latency            start from a preset (+preset=[a,b] stacks them; the last one wins)
  drafter=ngram              take another plugin for a slot
  drafter.max_width=2        set one of its values
  exporter=[jsonl,console]   several, where a slot takes several
'engine plugins' lists the plugins, 'engine config' prints every key and its value."""


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    name: str
    help: str
    run: Callable[[argparse.Namespace, list[str]], int]
    """Flags and overrides -> exit code."""
    flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    takes_overrides: bool = True
    notes: str = ""
    """What its help ends with, where there is nothing to say about overrides."""

    def parser(self) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=f"engine {self.name}",
            description=self.help,
            usage=f"engine {self.name} [--flags]" + (" [overrides]" if self.takes_overrides else ""),
            epilog=OVERRIDES_HELP if self.takes_overrides else self.notes or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if self.takes_overrides:
            parser.add_argument(
                "--config-dir",
                action="append",
                default=[],
                type=Path,
                metavar="DIR",
                help="folder with your own presets and variants (may be repeated)",
            )
        self.flags(parser)
        return parser

    def main(self, argv: Sequence[str]) -> int:
        parser = self.parser()
        flags, rest = parser.parse_known_args(list(argv))
        for word in rest:
            if word.startswith("-"):
                known = [option for action in parser._actions for option in action.option_strings]
                parser.error(f"no such flag {word.partition('=')[0]}{nearest(word.partition('=')[0], known)}")
            if not self.takes_overrides:
                parser.error(f"unexpected {word!r}")
        return self.run(flags, rest)


class _Parser(argparse.ArgumentParser):
    """One line on wrong usage, in the same form as every other message."""

    def error(self, message: str) -> NoReturn:
        print(f"engine: {message} ('{self.prog} --help' lists the flags)", file=sys.stderr)
        raise SystemExit(USAGE)


def report_failures(failures: Sequence[object]) -> None:
    """Plugins that are installed but broken: never silent, never in the way."""
    for failure in failures:
        print(f"engine: warning: {failure}", file=sys.stderr)
