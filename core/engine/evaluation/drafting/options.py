"""The flags of ``engine eval --drafter``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.evaluation.errors import EvalError
from engine.evaluation.options import at_least, overrides_of

DEFAULT_BATCHES = (1,)
DEFAULT_PAIRS = 3
ELSEWHERE = (
    "compare",
    "reference",
    "reference_dtype",
    "text",
    "jsonl",
    "questions",
    "stride",
    "chunk",
    "tokens",
    "max_perplexity_increase",
    "max_kl",
    "min_agreement",
    "min_exact",
    "requests_of",
    "memory",
    "capacity_only",
    "as_cuda",
)
"""Flags of the evaluation of quality, which mean nothing here."""
ONLY_HERE = ("prompts", "batch", "pairs", "max_slowdown")


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """A comparison of drafters, as asked for."""

    overrides: tuple[str, ...]
    """Of every engine."""
    drafters: tuple[tuple[str, ...], ...]
    """Further overrides, one set for each engine that drafts."""
    config_dirs: tuple[Path, ...]
    prompts: str
    batches: tuple[int, ...]
    """Requests that decode together."""
    pairs: int
    """How often every drafter is timed next to none."""
    answer_tokens: int
    """Most tokens of an answer."""
    max_slowdown: float | None
    """Limit of the time per token, as a multiple of that without drafts."""
    json_file: str | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The group of flags about drafters."""
    add = parser.add_argument_group("drafters (instead of quality; --answer-tokens as above)").add_argument
    add(
        "--drafter",
        action="append",
        default=[],
        metavar="OVERRIDES",
        help='time this drafter next to none, such as "drafter=eagle3 drafter.path=HEAD" (may be repeated)',
    )
    add("--prompts", metavar="FILE", help="a question a line; .jsonl: lines with a question, messages or a prompt")
    add("--batch", type=batches, metavar="N,...", help="requests that decode together (default 1)")
    add("--pairs", type=at_least(1), metavar="N", help=f"times each is timed next to none (default {DEFAULT_PAIRS})")
    add("--max-slowdown", type=factor, metavar="X", help="time per token over that of none, upper 95 %% bound")


def drafting_options_of(flags: argparse.Namespace, overrides: Sequence[str]) -> DraftingOptions | None:
    """The comparison that the parsed flags ask for; ``None`` when they ask for none. Raises :class:`EvalError` when
    they contradict each other."""
    if not flags.drafter:
        stated = _given(flags, ONLY_HERE)
        if stated:
            raise EvalError(f"{stated}: these compare drafters; name one, such as --drafter drafter=ngram")
        return None
    stated = _given(flags, ELSEWHERE)
    if stated:
        raise EvalError(f"{stated}: not with --drafter, which times drafters; evaluate quality in a run of its own")
    if not flags.prompts:
        raise EvalError("--drafter needs --prompts FILE: what a drafter brings depends on what is asked")
    if flags.max_slowdown is not None and (flags.pairs or DEFAULT_PAIRS) < 2:
        raise EvalError(f"--max-slowdown with --pairs {flags.pairs}: a bound needs at least 2 pairs")
    drafters = tuple(overrides_of("--drafter", text) for text in flags.drafter)
    for words in drafters:
        _check_about_drafting(words)
    return DraftingOptions(
        overrides=tuple(overrides),
        drafters=drafters,
        config_dirs=tuple(flags.config_dir),
        prompts=flags.prompts,
        batches=flags.batch or DEFAULT_BATCHES,
        pairs=flags.pairs or DEFAULT_PAIRS,
        answer_tokens=flags.answer_tokens,
        max_slowdown=flags.max_slowdown,
        json_file=flags.json,
    )


def _given(flags: argparse.Namespace, names: Sequence[str]) -> str:
    """Those of the flags that were given, for a message."""
    # Not by comparing with False: a limit of 0 is a limit.
    given = [name for name in names if not any(getattr(flags, name) is absent for absent in (None, False))]
    given = [name for name in given if getattr(flags, name) != []]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def is_about_drafting(word: str) -> bool:
    """Whether an override sets the drafter or one of its values."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0] == "drafter"


def _check_about_drafting(words: Sequence[str]) -> None:
    others = [word for word in words if not is_about_drafting(word)]
    if others or not words:
        raise EvalError(
            f"--drafter {' '.join(words)!r}: expected drafter=NAME and drafter.KEY=VALUE alone; what holds for every "
            "engine goes beside it, outside the quotes"
        )


def batches(text: str) -> tuple[int, ...]:
    """``1,4,16`` as numbers, each at least 1 and once."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1, such as 1,4,16")
    found = tuple(map(int, text.split(",")))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected each batch size once")
    return found


def factor(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, such as 1.05")
    return value
