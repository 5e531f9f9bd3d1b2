"""``engine``: finds the subcommand, runs it, turns problems into one clear message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from engine import __version__
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.cli.command import FAILED, OK, USAGE, Command

COMMANDS = {
    "serve": "start the OpenAI-compatible server",
    "bench": "measure TTFT, ITL and throughput of a running server",
    "eval": "measure what a plan costs in quality and what fits in memory",
    "check": "resolve a configuration without starting anything",
    "config": "print the composed configuration",
    "plugins": "list the installed plugins",
    "completion": "print a completion script for bash, zsh or fish",
}
HIDDEN = ("complete",)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 went wrong while running, 2 asked wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return OK
    if words[0] in ("--version", "-V"):
        print(f"engine {__version__}")
        return OK
    name, rest = words[0], words[1:]
    if name not in COMMANDS and name not in HIDDEN:
        hint = nearest(name, COMMANDS) or f" (commands: {listing(COMMANDS)})"
        print(f"engine: no such command {name!r}{hint}", file=sys.stderr)
        return USAGE
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    try:
        return load(name).main(rest)
    except AssemblyError as error:
        print(error.text(), file=sys.stderr)
        return USAGE
    except SystemExit as stop:  # argparse: --help and wrong flags
        return stop.code if isinstance(stop.code, int) else FAILED
    except BrokenPipeError:  # the reader (head, less) has gone; a second write at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return FAILED


def load(name: str) -> Command:
    """The subcommand's own module, imported only when it is called."""
    command = importlib.import_module(f"engine.cli.{name}").COMMAND
    assert isinstance(command, Command)
    return command


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: engine COMMAND [--flags] [overrides]\n\n"
        "An LLM inference server in which every latency optimisation is a plugin.\n\n"
        f"commands:\n{lines}\n\n"
        "start here:\n"
        "  engine serve +preset=latency\n"
        "  engine serve +preset=latency --model path/or/hub-id drafter=none\n\n"
        "'engine COMMAND --help' tells more; 'engine --version' the version."
    )


if __name__ == "__main__":
    sys.exit(main())
