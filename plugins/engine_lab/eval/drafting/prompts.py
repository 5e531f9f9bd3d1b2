"""The prompts that drafters are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.service.chat_template import TemplateFailed
from engine.service.errors import ApiError
from engine.service.parsing import parse_messages
from engine.service.tokenizer import Tokenizer
from engine_lab.eval.drafting.plans import Setting
from engine_lab.eval.questions import messages_of
from engine_lab.eval.windows import json_lines, read_lines
from engine_lab.shared.errors import EvalError

KEYS = ("question", "messages", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    text: str
    """As it is shown in messages."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    where: str
    text: str
    messages: tuple[dict[str, str], ...]
    """Empty: ``text`` is continued as it is."""


def read_prompts(path: str, setting: Setting, batches: Sequence[int]) -> list[Prompt]:
    """A question a line; or, in a file named ``.jsonl``, objects with one of ``question``, ``messages`` (both go
    through the chat template) and ``prompt`` (continued as it is). Other keys are not looked at.

    Raises :class:`EvalError` for lines that are none of these, a model without a chat template where one is needed,
    prompts that leave no room for an answer, and fewer prompts than the largest batch;
    :class:`~engine.service.tokenizer.TokenizerError` for a model without a tokenizer.
    """
    lines = _json(path) if Path(path).suffix == ".jsonl" else _plain(path)
    if len(lines) < max(batches):
        raise EvalError(
            f"--prompts {path}: {len(lines)} prompts do not fill a batch of {max(batches)}; expected more prompts or a "
            "smaller --batch"
        )
    tokenizer = Tokenizer.from_directory(setting.plan.model.path, setting.plan.model.vocab_size)
    try:
        return [_encoded(line, tokenizer, setting) for line in lines]
    finally:
        tokenizer.close()


def _plain(path: str) -> list[_Line]:
    lines = [(number, line.strip()) for number, line in enumerate(read_lines(path, "--prompts"), 1)]
    found = [
        _Line(f"--prompts {path}, line {number}", line, ({"role": "user", "content": line},))
        for number, line in lines
        if line
    ]
    if not found:
        raise EvalError(f"--prompts {path}: no prompts in it; expected a question a line")
    return found


def _json(path: str) -> list[_Line]:
    return [_line(where, value) for where, value in json_lines(path, "--prompts")]


def _line(where: str, value: dict[str, Any]) -> _Line:
    given = [key for key in KEYS if key in value]
    if len(given) != 1:
        has = " and ".join(given) or "none of them"
        raise EvalError(f"{where}: expected one of {', '.join(KEYS)}, found {has}")
    if given == ["prompt"]:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise EvalError(f"{where}: expected prompt to be a text")
        return _Line(where, value["prompt"], ())
    messages = messages_of(where, {given[0]: value[given[0]]})
    return _Line(where, messages[-1]["content"], messages)


def _encoded(line: _Line, tokenizer: Tokenizer, setting: Setting) -> Prompt:
    model, max_len = setting.plan.model.name, setting.plan.max_len
    if not line.messages:
        tokens = tokenizer.encode_now(line.text)
    elif tokenizer.template is None:
        raise EvalError(
            f"{line.where}: {model} has no chat template to ask with; expected a .jsonl file with lines of "
            '{"prompt": ...}, which are continued as they are'
        )
    else:
        try:
            tokens = tokenizer.encode_chat_now(parse_messages(line.messages))
        except (TemplateFailed, ApiError) as error:
            raise EvalError(f"{line.where}: the chat template of {model} refuses it: {error}") from error
    if not 0 < len(tokens) < max_len:
        raise EvalError(
            f"{line.where}: {len(tokens)} tokens, and {model} serves model.max_len={max_len} with the answer: set that "
            "larger, or leave the prompt out"
        )
    return Prompt(line.text, tuple(tokens))
