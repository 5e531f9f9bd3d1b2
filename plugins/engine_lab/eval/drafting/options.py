"""The flags of ``engine eval --drafter``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_lab.shared.errors import EvalError
from engine_lab.shared.flags import at_least, counts, given, overrides_of, positive

DEFAULT_BATCHES = (1,)
DEFAULT_PAIRS = 3
DEFAULT_TIMEOUT_S = 600.0
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
ONLY_HERE = ("prompts", "batch", "pairs", "max_slowdown", "timeout")


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
    timeout_s: float
    """Seconds within which an engine must start, and answer a batch."""
    json_file: str | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The group of flags about drafters."""
    add = parser.add_argument_group("drafters (instead of quality; --answer-tokens as above)").add_argument
    add(
        "--drafter",
        action="append",
        default=[],
        metavar="OVERRIDES",
        help='time this drafter next to none, as in "drafter=NAME drafter.max_width=4" (may be repeated)',
    )
    add("--prompts", metavar="FILE", help="a question a line; .jsonl: lines with a question, messages or a prompt")
    add("--batch", type=counts, metavar="N,...", help="requests that decode together (default 1)")
    add("--pairs", type=at_least(1), metavar="N", help=f"times each is timed next to none (default {DEFAULT_PAIRS})")
    add("--max-slowdown", type=positive, metavar="X", help="time per token over that of none, upper 95 %% bound")
    add(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help=f"give up on an engine that takes longer to start or to answer a batch (default {DEFAULT_TIMEOUT_S:g})",
    )


def drafting_options_of(flags: argparse.Namespace, overrides: Sequence[str]) -> DraftingOptions | None:
    """The comparison that the parsed flags ask for; ``None`` when they ask for none. Raises :class:`EvalError` when
    they contradict each other."""
    if not flags.drafter:
        if stated := given(flags, ONLY_HERE):
            raise EvalError(f"{stated}: these compare drafters; name one: --drafter drafter=NAME")
        return None
    if stated := given(flags, ELSEWHERE):
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
        timeout_s=flags.timeout or DEFAULT_TIMEOUT_S,
        json_file=flags.json,
    )


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
