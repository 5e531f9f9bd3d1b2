"""``engine eval``: what a configuration costs in quality, what it saves, and what drafters bring."""

from __future__ import annotations

import argparse

from engine.contracts.command import USAGE, Command
from engine_lab.eval.drafting.options import add_flags as add_drafting_flags
from engine_lab.eval.drafting.options import drafting_options_of
from engine_lab.eval.options import add_flags, options_of
from engine_lab.shared.errors import EvalError, complain
from engine_lab.shared.flags import check_empty, with_model


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    try:
        check_empty(flags)
        words = with_model(overrides, flags.model)
        drafting = drafting_options_of(flags, words)
        options = None if drafting is not None else options_of(flags, words)
    except EvalError as error:
        return complain("eval", error, USAGE)
    if drafting is not None:
        from engine_lab.eval.drafting.main import run as run_drafting

        return run_drafting(drafting)
    assert options is not None
    from engine_lab.eval.main import run

    return run(options)


def _flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    add_drafting_flags(parser)


COMMAND = Command(
    "Perplexity, KL and recall of a plan beside the same model unquantized; what fits; drafters.", _run, _flags
)
