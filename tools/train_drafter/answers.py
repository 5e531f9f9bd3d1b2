"""Training data: prompts, continued by the target itself (arXiv:2503.01840, section 4: the main lever on acceptance).

Prompts are lines of JSON: ``{"prompt": text}`` or ``{"messages": [...]}``, which goes through the model's chat template,
and optionally ``group`` (a name to report under), ``temperature`` (0: greedy) and ``max_tokens``. Answers are lines
``{"tokens": [...], "prompt_len": n, "group": ...}``, line by line those of the prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.serving.offline import LLM

AT_ONCE = 256
"""Prompts between two writes."""
KEYS = {"prompt", "messages", "group", "temperature", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and how it is answered."""

    text: str | None
    messages: tuple[dict[str, str], ...]
    group: str
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and what the target made of it."""

    tokens: tuple[int, ...]
    prompt_len: int
    """Tokens that are the prompt's; the rest are the target's own, the end token included."""
    group: str


def read_prompts(file: Path, max_tokens: int, temperature: float) -> list[Prompt]:
    """``max_tokens`` and ``temperature``: of lines that say nothing. Raises ``ValueError`` naming a line that is
    wrong."""
    prompts = []
    for number, line in enumerate(_lines(file), 1):
        where = f"{file}, line {number}"
        if not isinstance(line, dict) or line.keys() - KEYS or ("prompt" in line) == ("messages" in line):
            raise ValueError(f'{where}: expected either "prompt" or "messages", and besides only {sorted(KEYS)[:2]} ...')
        messages = tuple(line.get("messages", ()))
        prompts.append(
            Prompt(
                text=line.get("prompt"),
                messages=messages,
                group=str(line.get("group", "all")),
                temperature=float(line.get("temperature", temperature)),
                max_tokens=int(line.get("max_tokens", max_tokens)),
            )
        )
    if not prompts:
        raise ValueError(f"{file}: no prompts in it")
    return prompts


def read_answers(file: Path) -> list[Answered]:
    """Those with at least two tokens of the target: a draft follows the first. Raises ``ValueError``."""
    found = []
    for number, line in enumerate(_lines(file), 1):
        try:
            answered = Answered(tuple(line["tokens"]), int(line["prompt_len"]), str(line["group"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file}, line {number}: expected tokens, prompt_len and group ({error!r})") from error
        if 1 <= answered.prompt_len <= len(answered.tokens) - 2:
            found.append(answered)
    if not found:
        raise ValueError(f"{file}: no answers of two tokens or more in it")
    return found


def answer(model: str, prompts: Sequence[Prompt], out: Path, overrides: Sequence[str] = (), seed: int = 0) -> None:
    """Continue all prompts and write ``out``; one that is there already is continued where it ends."""
    done = len(_lines(out)) if out.exists() else 0
    if done >= len(prompts):
        return
    llm = LLM(model, overrides=list(overrides))
    try:
        with out.open("a", encoding="utf-8") as file:
            for start in range(done, len(prompts), AT_ONCE):
                piece = prompts[start : start + AT_ONCE]
                for line in _answered(llm, piece, seed + start):
                    file.write(json.dumps(line) + "\n")
                file.flush()
                print(f"{start + len(piece)} of {len(prompts)} answered", file=sys.stderr)
    finally:
        llm.close()



def _answered(llm: LLM, prompts: Sequence[Prompt], seed: int) -> list[dict[str, Any]]:
    """In the order of the prompts."""
    lines: dict[int, dict[str, Any]] = {}
    order = sorted(range(len(prompts)), key=lambda i: _sampling(prompts[i]))
    for (temperature, max_tokens), indices in groupby(order, key=lambda i: _sampling(prompts[i])):
        chosen = list(indices)
        asked = [_tokens(llm, prompts[i]) for i in chosen]
        options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        for i, tokens, completion in zip(chosen, asked, llm.generate(asked, **options), strict=True):
            found = [*tokens, *completion.tokens]
            lines[i] = {"tokens": found, "prompt_len": len(tokens), "group": prompts[i].group}
    return [lines[i] for i in range(len(prompts))]


def _sampling(prompt: Prompt) -> tuple[float, int]:
    return prompt.temperature, prompt.max_tokens


def _tokens(llm: LLM, prompt: Prompt) -> list[int]:
    if prompt.text is not None:
        return list(llm.tokenizer.encode_now(prompt.text))
    return list(llm.tokenizer.encode_chat_now(list(prompt.messages)))


def _lines(file: Path) -> list[Any]:
    """Raises ``ValueError`` for what is no file of JSON lines."""
    try:
        return [json.loads(text) for text in file.read_text(encoding="utf-8").split("\n") if text.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: expected a file of JSON lines ({error})") from error
