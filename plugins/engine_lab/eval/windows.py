"""Text as windows of tokens, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine_lab.shared.errors import EvalError


class Encode(Protocol):
    """A tokenizer: text to token ids, with those that begin a text unless ``add_special_tokens`` is False."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are computed together; those from ``first`` on are predicted and scored. ``first >= 1``."""

    tokens: tuple[int, ...]
    first: int = 1

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def text_windows(tokens: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``context`` tokens, ``stride`` apart. Each token counts once: in the first window that has
    anything before it."""
    scored_up_to = 0
    for start in range(0, len(tokens), stride):
        end = min(start + context, len(tokens))
        first = max(1, scored_up_to - start)
        if end - start > first:
            yield Window(tuple(tokens[start:end]), first)
        scored_up_to = end
        if end == len(tokens):
            return


def limited(windows: Sequence[Window], most: int | None) -> list[Window]:
    """The first windows, cut where ``most`` tokens are scored."""
    kept: list[Window] = []
    left = most
    for window in windows:
        if left is None or window.scored <= left:
            kept.append(window)
        elif left > 0:
            kept.append(Window(window.tokens[: window.first + left], window.first))
        left = None if left is None else max(0, left - window.scored)
    return kept


def read_text(path: str, encode: Encode, context: int, stride: int) -> list[Window]:
    """Windows of a UTF-8 file. Raises :class:`EvalError` where there is nothing to score."""
    tokens = encode(_read(path, "--text"))
    if len(tokens) < 2:
        raise EvalError(f"--text {path}: {len(tokens)} tokens; at least 2 are needed to predict one from another")
    return list(text_windows(tokens, context, stride))


def read_prompts(path: str, encode: Encode, context: int, stride: int) -> list[Window]:
    """Windows of lines of ``{"prompt": ...}`` (all of it is scored) and ``{"prompt": ..., "completion": ...}`` (only
    the completion). Raises :class:`EvalError` naming the line that is wrong."""
    windows: list[Window] = []
    for where, line in json_lines(path, "--jsonl"):
        check_keys(where, line, required=("prompt",), optional=("completion",))
        prompt = list(encode(line["prompt"]))
        if "completion" not in line:
            windows += text_windows(prompt, context, stride)
            continue
        tokens = [*prompt, *encode(line["completion"], False)]  # it goes on, it begins nothing
        if not prompt or len(tokens) == len(prompt):
            raise EvalError(f"{where}: an empty prompt or completion, there is nothing to predict")
        if len(tokens) > context:
            raise EvalError(f"{where}: {len(tokens)} tokens, more than --context {context}; set it larger")
        windows.append(Window(tuple(tokens), len(prompt)))
    if not windows:
        raise EvalError(f"--jsonl {path}: no line has two tokens, so nothing can be predicted")
    return windows


def json_lines(path: str, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object of a file of JSON lines is, and the object. Raises :class:`EvalError` for anything else."""
    found = False
    # Not splitlines(): a string in JSON may hold what that takes for the end of a line (U+2028, U+0085).
    for number, text in enumerate(read_lines(path, flag), 1):
        if not text.strip():
            continue
        where = f"{flag} {path}, line {number}"
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EvalError(f"{where}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise EvalError(f"{where}: expected a JSON object, found a {type(value).__name__}")
        found = True
        yield where, value
    if not found:
        raise EvalError(f"{flag} {path}: no lines in it")


def check_keys(where: str, line: dict[str, Any], required: Sequence[str], optional: Sequence[str]) -> None:
    """Raise :class:`EvalError` for a missing, unknown or non-text key."""
    missing = [key for key in required if key not in line]
    unknown = sorted(line.keys() - {*required, *optional})
    if missing or unknown:
        has = f"lacks {', '.join(missing)}" if missing else f"has the unknown key {', '.join(unknown)}"
        expected = ", ".join((*required, *(f"{key} (optional)" for key in optional)))
        raise EvalError(f"{where}: {has}; expected {expected}")
    for key, value in line.items():
        if not isinstance(value, str):
            raise EvalError(f"{where}: {key} is a {type(value).__name__}, expected text")


def read_lines(path: str, flag: str) -> list[str]:
    """A file's lines, which only a line feed ends. Raises :class:`EvalError` for what is no text or empty."""
    return _read(path, flag).split("\n")


def _read(path: str, flag: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark; it is no text
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{flag} {path}: expected a file of UTF-8 text ({error})") from error
    if not text.strip():
        raise EvalError(f"{flag} {path}: expected some text, found none")
    return text
