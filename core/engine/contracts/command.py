"""A subcommand of ``engine``: what a plugin offers from the hook ``engine_command``.

The core parses the line: words that start with ``-`` are flags, the others are configuration overrides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done, went wrong, asked wrongly, Ctrl-C. A command may return others, which its ``notes`` should list."""


@dataclass(frozen=True, slots=True)
class CommandProvider:
    """One subcommand on offer: metadata alone, so that listing commands imports none of them.

    ``command`` is ``"package.module:attribute"`` of a :class:`Command`; it is imported when the command is called.
    ``api`` is the interface version the plugin was written for: write it as a literal.
    """

    name: str
    """Lower-case letters, digits, ``_`` and ``-``."""
    command: str
    doc: str
    """One line for the list of commands."""
    api: tuple[int, int] = (1, 0)
    finds: str = ""
    """``"package.module:function"``: an async function that is given an
    :class:`~engine.contracts.findings.EngineReader` and returns :class:`~engine.contracts.findings.Findings`. The page
    at ``/ui/`` then offers to run it, in the server's process: it must not block. Empty: the page does not offer it."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a subcommand does."""

    help: str
    """What its own help starts with."""
    run: Callable[[argparse.Namespace, list[str]], int]
    """Flags and overrides -> exit code. Imports of anything heavy belong in here. Overrides arrive as they were typed;
    ``engine.LLM(model, overrides=overrides)`` composes them."""
    flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Adds its flags; called for help and completion, too."""
    takes_overrides: bool = True
    """Whether words that are no flags are configuration overrides; ``flags.config_dir``, a list of paths, comes with
    them. Otherwise such words are refused."""
    notes: str = ""
    """What its help says below its flags."""
