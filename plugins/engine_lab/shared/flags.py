"""What the flags of an evaluation say: which were given, and their values."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Sequence
from decimal import Decimal

from engine.assembly.compose import quoted
from engine_lab.shared.errors import EvalError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
"""Decimal and binary multiples of a byte."""
MOST_BYTES = 2**60


def given(flags: argparse.Namespace, names: Sequence[str]) -> str:
    """Those of the flags ``names`` that were given, as one writes them, for a message; empty: none."""
    # Not by comparing with False: a limit of 0 is a limit.
    absent = [name for name in names if any(getattr(flags, name) is nothing for nothing in (None, False))]
    found = [name for name in names if name not in absent and getattr(flags, name) != []]
    return ", ".join(f"--{name.replace('_', '-')}" for name in found)


def check_empty(flags: argparse.Namespace) -> None:
    """Raise :class:`EvalError` for a name that is empty, as an unset variable of a shell makes it: it would count as
    not given."""
    for name in ("model", "reference", "text", "jsonl", "questions", "prompts", "json"):
        if getattr(flags, name) == "":
            raise EvalError(f"--{name} is empty; expected a name, or leave the flag out")


def with_model(overrides: Sequence[str], path: str | None) -> list[str]:
    """The overrides, and ``--model PATH`` as the last of them, if given."""
    return [*overrides, *(() if path is None else (assignment("model.path", path),))]


def assignment(key: str, value: object) -> str:
    """The override that sets ``key``, whatever characters are in ``value``."""
    return f"{key}={_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def overrides_of(flag: str, text: str) -> tuple[str, ...]:
    """The overrides in the value of ``flag``, as a shell would take them apart. Raises :class:`EvalError`."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise EvalError(f"{flag} {text!r}: expected overrides ({error})") from error
    flags = [word for word in words if word.startswith("-")]
    if flags:
        raise EvalError(f"{flag} {text!r}: {flags[0]} is a flag, expected overrides alone")
    return words


def at_least(lowest: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``lowest`` on."""

    def integer(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {lowest}")
        return int(text)

    return integer


def counts(text: str) -> tuple[int, ...]:
    """``1,4,16`` as numbers, each at least 1 and once."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1, such as 1,4,16")
    found = tuple(map(int, text.split(",")))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected each of them once")
    return found


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = amount(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 to 1, such as 0.99")
    return value


def amount(text: str) -> float:
    """A finite number from 0 on."""
    value = _number(text)
    if value is None or value < 0.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 on")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if value is None or value <= 0.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def _number(text: str) -> float | None:
    """``None``: not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def num_bytes(text: str) -> int:
    """``80GiB`` or ``85899345920`` as bytes; at least one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found.group(2).upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 80GiB or 80GB")
    value = int(Decimal(found.group(1)) * UNITS[found.group(2).upper()])
    if not 1 <= value <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: expected at least one byte and at most {MOST_BYTES}")
    return value


def capability(text: str) -> tuple[int, int]:
    """``9.0`` as ``(9, 0)``."""
    found = re.fullmatch(r"(\d+)\.(\d)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a compute capability such as 9.0")
    return int(found.group(1)), int(found.group(2))
