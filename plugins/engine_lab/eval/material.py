"""What an evaluation runs on: the user's text and questions, or the bundled model's own suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine.assembly.model_config import bundled_dir
from engine.assembly.plan import EnginePlan
from engine.service.tokenizer import Tokenizer
from engine_lab.eval.options import EvalOptions
from engine_lab.eval.questions import Question, check_questions, read_questions, recall_questions
from engine_lab.eval.windows import Encode, Window, limited, read_prompts, read_text
from engine_lab.shared.errors import EvalError

HELD_OUT = "heldout.txt"
"""Beside the bundled model: text it was not trained on."""


@dataclass(frozen=True, slots=True)
class Material:
    """``windows`` and ``questions`` may each be empty."""

    source: str
    """What it is, in words."""
    windows: tuple[Window, ...]
    questions: tuple[Question, ...]
    match: str


def read_material(options: EvalOptions, reference: EnginePlan, plans: Sequence[EnginePlan]) -> Material:
    """Everything is tried on every plan's tokenizer here, before a weight is read.

    Raises :class:`EvalError` for unusable files, windows and questions longer than a plan allows, plans that cut the
    text into other tokens than the reference does, and tokens that a model does not have;
    :class:`~engine.service.tokenizer.TokenizerError` for a model without a tokenizer.
    """
    options, questions, match = _with_suite(options, plans[0])
    windows: list[Window] = []
    if options.text or options.jsonl:
        _check_context(options.context, [reference, *plans])
        windows = _windows(options, reference)
        for plan in _by_path(plans):
            if plan.model.path != reference.model.path and windows != _windows(options, plan):
                raise EvalError(
                    f"the tokenizers of {plan.model.path} and the reference {reference.model.path} cut the text into "
                    "different tokens: expected the same model before and after quantization"
                )
    for plan in [reference, *plans] if questions else []:
        with _tokenizer(plan) as tokenizer:
            check_questions(questions, tokenizer, plan.model.name, plan.max_len)
    names = [*(Path(path).name for path in options.files), *(["recall.json"] if match != options.match else [])]
    return Material(", ".join(names), tuple(windows), tuple(questions), match)


def _check_context(context: int, plans: Sequence[EnginePlan]) -> None:
    shortest = min(plans, key=lambda plan: plan.max_len)
    if context > shortest.max_len:
        raise EvalError(
            f"--context {context}: more than model.max_len={shortest.max_len} of {shortest.model.name}; set it smaller"
        )


def _by_path(plans: Sequence[EnginePlan]) -> Sequence[EnginePlan]:
    """One plan for each model."""
    return list({plan.model.path: plan for plan in plans}.values())


def _with_suite(options: EvalOptions, plan: EnginePlan) -> tuple[EvalOptions, Sequence[Question], str]:
    if options.files:
        found = read_questions(options.questions) if options.questions else []
        return options, found, options.match
    suite = bundled_dir()
    if not _same_tokenizer(Path(plan.model.path), suite):
        raise EvalError(
            f"nothing to evaluate {plan.model.name} on: give --text, --jsonl or --questions (the bundled model alone, "
            "and what is made from it, has a suite of its own)"
        )
    return replace(options, text=str(suite / HELD_OUT)), recall_questions(suite), "begins"


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [folder / "tokenizer.json" for folder in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


@contextmanager
def _tokenizer(plan: EnginePlan) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_directory(plan.model.path, plan.model.vocab_size)
    try:
        yield tokenizer
    finally:
        tokenizer.close()


def _windows(options: EvalOptions, plan: EnginePlan) -> list[Window]:
    with _tokenizer(plan) as tokenizer:
        windows = limited(_read(options, tokenizer.encode_now), options.tokens)
    largest = max(max(window.tokens) for window in windows)
    if largest >= plan.model.vocab_size:
        raise EvalError(
            f"the tokenizer of {plan.model.path} makes token {largest} of the text, but config.json says "
            f"vocab_size={plan.model.vocab_size}"
        )
    return windows


def _read(options: EvalOptions, encode: Encode) -> list[Window]:
    if options.text is not None:
        return read_text(options.text, encode, options.context, options.stride)
    assert options.jsonl is not None
    return read_prompts(options.jsonl, encode, options.context, options.stride)
