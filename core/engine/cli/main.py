"""``engine``: finds the subcommand, runs it, turns problems into one clear message and an exit code."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the current folder there, which may be anybody's: its files are not run

import os
import traceback
from collections.abc import Sequence

from engine.assembly.discovery import discover
from engine.assembly.errors import AssemblyError
from engine.cli.command import run
from engine.cli.commands import OWN, commands, find, load, split
from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine.plugin_guard.calls import PluginError
from engine.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 went wrong while running, 2 asked wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return OK
    if words[0] in ("--version", "-V"):
        print(f"engine {VERSION}")
        return OK
    try:
        os.getcwd()
    except FileNotFoundError:
        print("engine: the current folder is gone; change to one that exists", file=sys.stderr)
        return USAGE
    try:
        name, rest = split(words)
        offer = find(name)
        return run(name, load(offer), rest)
    except AssemblyError as error:
        print(error.text(), file=sys.stderr)
        return USAGE
    except SystemExit as stop:  # argparse: --help and wrong flags
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else OK if stop.code is None else FAILED
    except BrokenPipeError:  # the reader (head, less) has gone; a second write at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if offer.provider in OWN:
            raise
        traceback.print_exc()
        why = f": {error}" if isinstance(error, PluginError) else ""
        print(f"engine: command {offer.qualified} failed{why}", file=sys.stderr)
        return FAILED


def usage() -> str:
    discovered = discover()
    known = commands(discovered)
    width = max(map(len, known))
    lines = "\n".join(f"  {name:<{width}}  {offer.provider.doc}" for name, offer in known.items())
    broken = f"{len(discovered.failures)} failures of plugins: 'engine plugins'\n\n" if discovered.failures else ""
    return (
        "usage: engine COMMAND [--flags] [overrides]\n\n"
        "An LLM inference server in which every latency optimisation is a plugin.\n\n"
        f"commands:\n{lines}\n\n"
        f"{broken}"
        "start here:\n"
        "  engine serve +preset=latency\n"
        "  engine serve +preset=latency --model path/or/hub-id drafter=none\n\n"
        "'engine COMMAND --help' tells more; 'engine --version' the version."
    )


if __name__ == "__main__":
    sys.exit(main())
