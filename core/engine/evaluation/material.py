"""What an evaluation runs on: the user's text and questions, or the bundled model's own suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.assembly.model_facts import bundled_dir
from engine.assembly.plan import EnginePlan
from engine.evaluation.options import EvalOptions
from engine.evaluation.questions import Question, read_questions, recall_questions
from engine.evaluation.windows import Encode, Window, limited, read_prompts, read_text
from engine.serving.tokenizer import Tokenizer

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


def read_material(options: EvalOptions, reference: EnginePlan, plan: EnginePlan) -> Material:
    """Raises ``ValueError`` for unusable files, windows longer than the model allows, and a reference that has other
    tokens; :class:`~engine.serving.tokenizer.TokenizerError` for a model without a tokenizer."""
    options, questions, match = _with_suite(options, plan)
    parts = [path for path in (options.text, options.jsonl, options.questions) if path]
    windows: list[Window] = []
    if options.text or options.jsonl:
        if options.context > plan.max_len:
            raise ValueError(f"--context {options.context}: more than model.max_len={plan.max_len}; set it smaller")
        windows = _windows(options, plan.model.path)
        if reference.model.path != plan.model.path and windows != _windows(options, reference.model.path):
            raise ValueError(
                f"the tokenizers of {plan.model.path} and the reference {reference.model.path} cut the text into "
                "different tokens: expected the same model before and after quantization"
            )
    source = ", ".join([*(Path(path).name for path in parts), *(["recall.json"] if match != options.match else [])])
    return Material(source, tuple(windows), tuple(questions), match)


def _with_suite(options: EvalOptions, plan: EnginePlan) -> tuple[EvalOptions, Sequence[Question], str]:
    if options.has_material:
        found = read_questions(options.questions) if options.questions else []
        return options, found, options.match
    suite = bundled_dir()
    if not _same_tokenizer(Path(plan.model.path), suite):
        raise ValueError(
            f"nothing to evaluate {plan.model.name} on: give --text, --jsonl or --questions (the bundled model alone, "
            "and what is made from it, has a suite of its own)"
        )
    return replace(options, text=str(suite / HELD_OUT)), recall_questions(suite), "begins"


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [folder / "tokenizer.json" for folder in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def _windows(options: EvalOptions, model: str) -> list[Window]:
    tokenizer = Tokenizer.from_directory(model)
    try:
        return limited(_read(options, tokenizer.encode_now), options.tokens)
    finally:
        tokenizer.close()


def _read(options: EvalOptions, encode: Encode) -> list[Window]:
    if options.text is not None:
        return read_text(options.text, encode, options.context, options.stride)
    assert options.jsonl is not None
    return read_prompts(options.jsonl, encode, options.context, options.stride)
