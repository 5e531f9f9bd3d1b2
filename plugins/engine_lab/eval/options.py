"""The command line of ``engine eval``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from engine_lab.shared.errors import EvalError
from engine_lab.shared.flags import amount, at_least, capability, given, num_bytes, overrides_of, share

DEFAULT_CONTEXT = 1024
DEFAULT_REQUEST = 4096
DEFAULT_ANSWER_TOKENS = 64
MATCHES = ("exact", "begins")
TEXTS = ("text", "jsonl")
"""Flags that bring what is scored, token by token."""
MATERIAL = (*TEXTS, "questions")
OF_TEXT = ("max_perplexity_increase", "max_kl", "min_agreement")
"""Tolerances on what text shows."""
OF_QUESTIONS = ("min_exact",)
"""Tolerances on what questions show."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may lose; ``None``: anything."""

    perplexity_increase: float | None = None
    """Relative: 0.01 is one per cent."""
    kl: float | None = None
    """Nats per token."""
    agreement: float | None = None
    """Least share of tokens."""
    exact: float | None = None
    """Least share of questions."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """An evaluation, as asked for."""

    overrides: tuple[str, ...]
    """Of every plan."""
    compare: tuple[tuple[str, ...], ...]
    """Further overrides, one set for each plan; empty: one plan."""
    config_dirs: tuple[Path, ...]
    reference: str | None
    """Directory or hub id of the unquantized model, where the plans' own is quantized."""
    reference_dtype: str | None
    text: str | None
    jsonl: str | None
    questions: str | None
    context: int
    """Tokens of a window."""
    stride: int
    """Tokens from the start of a window to that of the next."""
    chunk: int
    """Tokens of a window that one forward pass takes."""
    tokens: int | None
    """Most tokens to score."""
    match: str
    answer_tokens: int
    limits: Limits
    json_file: str | None
    capacity_only: bool
    requests_of: int | None
    """Tokens of a request whose number is estimated; ``None``: 4096, or all the model allows."""
    memory: int | None
    """Bytes; ``None``: the device's."""
    cuda_capability: tuple[int, int] | None
    """Of a card that is not here, to estimate its capacity."""

    @property
    def files(self) -> list[str]:
        """The text and questions that the user brought."""
        return [path for path in (self.text, self.jsonl, self.questions) if path is not None]


def options_of(flags: argparse.Namespace, overrides: list[str]) -> EvalOptions:
    """The evaluation that the parsed flags ask for. Raises :class:`EvalError` when they contradict each other."""
    if flags.text and flags.jsonl:
        raise EvalError("--text and --jsonl exclude each other: one text is scored")
    stride = flags.context if flags.stride is None else flags.stride
    if stride > flags.context:
        raise EvalError(f"--stride {stride}: larger than --context {flags.context}, so text between would be skipped")
    if flags.as_cuda and not (flags.capacity_only and flags.memory):
        raise EvalError("--as-cuda needs --capacity-only and --memory: there is no such card here to run on")
    _check_measured(flags)
    limits = Limits(flags.max_perplexity_increase, flags.max_kl, flags.min_agreement, flags.min_exact)
    return EvalOptions(
        overrides=tuple(overrides),
        compare=tuple(overrides_of("--compare", text) for text in flags.compare),
        config_dirs=tuple(flags.config_dir),
        reference=flags.reference,
        reference_dtype=flags.reference_dtype,
        text=flags.text,
        jsonl=flags.jsonl,
        questions=flags.questions,
        context=flags.context,
        stride=stride,
        chunk=flags.chunk or flags.context,
        tokens=flags.tokens,
        match=flags.match,
        answer_tokens=flags.answer_tokens,
        limits=limits,
        json_file=flags.json,
        capacity_only=flags.capacity_only,
        requests_of=flags.requests_of,
        memory=flags.memory,
        cuda_capability=flags.as_cuda,
    )


def _check_measured(flags: argparse.Namespace) -> None:
    """Raise :class:`EvalError` for a tolerance on what nothing measures here, which would always be met, and for text
    that nothing would score."""
    if flags.capacity_only:
        if stated := given(flags, (*MATERIAL, "reference")):
            raise EvalError(f"{stated}: --capacity-only reads no text and loads no model; leave one of them out")
        if stated := given(flags, (*OF_TEXT, *OF_QUESTIONS)):
            raise EvalError(f"{stated}: --capacity-only measures no quality; leave one of them out")
    if not given(flags, MATERIAL):
        return  # the bundled model's own suite has all of it
    if (stated := given(flags, OF_TEXT)) and not given(flags, TEXTS):
        raise EvalError(f"{stated}: nothing here measures that; give --text or --jsonl")
    if (stated := given(flags, OF_QUESTIONS)) and not flags.questions:
        raise EvalError(f"{stated}: nothing here measures that; give --questions")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``engine eval``; without --text, --jsonl and --questions the bundled model has a suite of its own."""
    _add_plans(parser)
    _add_material(parser)
    _add_limits(parser)
    _add_capacity(parser)
    parser.add_argument("--json", metavar="FILE", help="write the result there as JSON")


def _add_plans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="short for model.path: 'bundled', a directory or a hub id")
    add = parser.add_argument_group("what is compared").add_argument
    add(
        "--compare",
        action="append",
        default=[],
        metavar="OVERRIDES",
        help="one more plan: these overrides on top of the others, in quotes (may be repeated)",
    )
    add("--reference", metavar="DIR", help="the unquantized model, where model.path is a quantized checkpoint")
    add(
        "--reference-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="compute dtype of the reference (default: the plans')",
    )


def _add_material(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("on what").add_argument
    add("--text", metavar="FILE", help="UTF-8 text, cut into windows; all tokens but the first of each are scored")
    add("--jsonl", metavar="FILE", help='lines of {"prompt": ...}, or with "completion": then only that is scored')
    add("--questions", metavar="FILE", help='lines of {"question" or "messages": ..., "answer": ...}, asked greedily')
    add("--context", type=at_least(2), default=DEFAULT_CONTEXT, help=f"tokens of a window (default {DEFAULT_CONTEXT})")
    add("--stride", type=at_least(1), help="tokens between the starts of windows (default: --context)")
    add("--chunk", type=at_least(1), help="tokens that one forward pass takes (default: a window; 1: as in decode)")
    add("--tokens", type=at_least(1), metavar="N", help="score at most so many tokens")
    add("--match", choices=MATCHES, default="exact", help="answers equal the expected one, or begin with it")
    add("--answer-tokens", type=at_least(1), default=DEFAULT_ANSWER_TOKENS, help="most tokens of an answer")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tolerances (exit status 1 outside)").add_argument
    add("--max-perplexity-increase", type=amount, metavar="X", help="relative to the reference: 0.01 is one per cent")
    add("--max-kl", type=amount, metavar="NATS", help="mean KL divergence per token")
    add("--min-agreement", type=share, metavar="X", help="share of tokens with the reference's first choice")
    add("--min-exact", type=share, metavar="X", help="share of questions answered as expected")


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("capacity").add_argument
    add("--requests-of", type=at_least(1), metavar="N", help=f"tokens of a request (default {DEFAULT_REQUEST})")
    add("--memory", type=num_bytes, metavar="SIZE", help="80GiB, 80GB, ...: instead of the device's")
    add("--capacity-only", action="store_true", help="load nothing: estimate from shapes (a config.json is enough)")
    add("--as-cuda", type=capability, metavar="X.Y", help="with it: for a CUDA card of this compute capability")
