"""Training data: prompts, continued by the target itself (arXiv:2503.01840, section 4: the main lever on acceptance).

Prompts are lines of JSON: ``{"prompt": text}`` or ``{"messages": [...]}``, which goes through the model's chat
template, and optionally ``group`` (a name to report under), ``temperature`` (0: greedy), ``max_tokens`` and ``guess``:
text that the greedy answer may begin with. A guess costs one forward pass, and is accepted as far as the target would
have said the same; nothing is generated then. Answers are lines
``{"tokens": [...], "prompt_len": n, "group": ...}``, in the order of the prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.train_drafter.target import Target

from engine.service.offline import LLM
from engine.service.parsing import parse_messages
from engine.service.tokenizer import Tokenizer

AT_ONCE = 256
"""Prompts between two writes."""
JUDGED_AT_ONCE = 32
"""Guesses in one forward pass."""
ENGINE = ("scheduler.max_requests=64", "scheduler.token_budget=1024", "drafter=none")
KEYS = {"prompt", "messages", "group", "temperature", "max_tokens", "guess"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and how it is answered."""

    text: str | None
    messages: tuple[dict[str, str], ...]
    group: str
    temperature: float
    max_tokens: int
    guess: str | None = None


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
            raise ValueError(f'{where}: expected either "prompt" or "messages", and of {sorted(KEYS)} no others')
        messages = tuple(line.get("messages", ()))
        prompts.append(
            Prompt(
                text=line.get("prompt"),
                messages=messages,
                group=str(line.get("group", "all")),
                temperature=float(line.get("temperature", temperature)),
                max_tokens=int(line.get("max_tokens", max_tokens)),
                guess=line.get("guess"),
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


def answer(
    model: str, prompts: Sequence[Prompt], out: Path, device: str = "auto", dtype: str = "auto", seed: int = 0
) -> None:
    """Answer all prompts and write ``out``; one that is there already is continued where it ends. Guesses are judged
    before anything is generated."""
    done = len(_lines(out)) if out.exists() else 0
    if done >= len(prompts):
        return
    answering = _Answering(model, device, dtype)
    try:
        with out.open("a", encoding="utf-8") as file:
            for start in range(done, len(prompts), AT_ONCE):
                piece = prompts[start : start + AT_ONCE]
                for line in answering.lines(piece, seed + start):
                    file.write(json.dumps(line) + "\n")
                file.flush()
                print(f"{start + len(piece)} of {len(prompts)} answered", file=sys.stderr)
    finally:
        answering.close()


class _Answering:
    """The target twice: to judge guesses, and as an engine that generates, from the first prompt that needs it on."""

    def __init__(self, model: str, device: str, dtype: str) -> None:
        self._target = Target(model, device, dtype)
        self._tokenizer = Tokenizer.from_directory(self._target.facts.path)
        self._overrides = [f"device={device}", f"model.dtype={dtype}", *ENGINE]
        self._llm: LLM | None = None

    def lines(self, prompts: Sequence[Prompt], seed: int) -> list[dict[str, Any]]:
        """In the order of the prompts."""
        asked = [self._tokens(prompt) for prompt in prompts]
        own: dict[int, Sequence[int]] = {}
        guessed = [i for i, prompt in enumerate(prompts) if prompt.guess is not None and prompt.temperature == 0]
        for start in range(0, len(guessed), JUDGED_AT_ONCE):
            own |= self._judge(prompts, asked, guessed[start : start + JUDGED_AT_ONCE])
        order = sorted(set(range(len(prompts))) - own.keys(), key=lambda i: _sampling(prompts[i]))
        for (temperature, max_tokens), indices in groupby(order, key=lambda i: _sampling(prompts[i])):
            chosen = list(indices)
            completions = self._engine().generate(
                [asked[i] for i in chosen], temperature=temperature, max_tokens=max_tokens, seed=seed
            )
            own |= {i: completion.tokens for i, completion in zip(chosen, completions, strict=True)}
        return [
            {"tokens": [*asked[i], *own[i]], "prompt_len": len(asked[i]), "group": prompt.group}
            for i, prompt in enumerate(prompts)
        ]

    def close(self) -> None:
        self._tokenizer.close()
        if self._llm is not None:
            self._llm.close()

    def _judge(self, prompts: Sequence[Prompt], asked: Sequence[list[int]], chosen: list[int]) -> dict[int, list[int]]:
        """The greedy answers as far as guesses give them, by index."""
        guesses = {i: self._tokenizer.encode_now(prompts[i].guess or "", False) for i in chosen}
        guesses = {i: tuple(guess[: prompts[i].max_tokens]) for i, guess in guesses.items()}
        residual = self._target.see([[*asked[i], *guesses[i]] for i in chosen], ()).residual
        found = {}
        for row, i in enumerate(chosen):
            first = len(asked[i]) - 1
            likeliest, _ = self._target.likeliest(residual[row, first : first + len(guesses[i])], 1)
            said = likeliest[:, 0].tolist()
            right = next((n for n, pair in enumerate(zip(said, guesses[i], strict=True)) if pair[0] != pair[1]), None)
            found[i] = said if right is None else said[: right + 1]
        return found

    def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.text is not None:
            return list(self._tokenizer.encode_now(prompt.text))
        return list(self._tokenizer.encode_chat_now(parse_messages(prompt.messages)))

    def _engine(self) -> LLM:
        if self._llm is None:
            self._llm = LLM(self._target.facts.path, overrides=self._overrides)
        return self._llm


def _sampling(prompt: Prompt) -> tuple[float, int]:
    return prompt.temperature, prompt.max_tokens


def _lines(file: Path) -> list[Any]:
    """Raises ``ValueError`` for what is no file of JSON lines."""
    try:
        return [json.loads(text) for text in file.read_text(encoding="utf-8").split("\n") if text.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: expected a file of JSON lines ({error})") from error
