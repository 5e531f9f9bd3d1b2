"""``engine eval``: what a configuration costs in quality, and what it saves."""

from __future__ import annotations

import argparse
import sys

from engine.cli.command import USAGE, Command
from engine.evaluation.errors import EvalError
from engine.evaluation.options import add_flags, options_of


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.assembly.compose import quoted

    model = [] if flags.model is None else [f"model.path={quoted(flags.model)}"]
    try:
        options = options_of(flags, [*overrides, *model])
    except EvalError as error:
        print(f"engine: {error}", file=sys.stderr)
        return USAGE
    from engine.evaluation.main import run

    return run(options)


COMMAND = Command(
    "eval", "Perplexity, KL and recall of a plan beside the same model unquantized; what fits.", _run, add_flags
)
