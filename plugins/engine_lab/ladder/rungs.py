"""What the rungs of a ladder change: overrides of the engine, and the form of the requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Words = tuple[str, ...]
"""Overrides of the engine's configuration and, as ``workload.KEY=VALUE``, of the requests' form."""

BASELINE = "+preset=baseline"
WORKLOAD = "workload."
P99 = "p99"
DEFAULT_RUNGS = (
    "streaming: workload.stream=true",
    "static prefix first: kv_allocator=prefix_cache workload.static_first=true",
    "max_tokens: workload.max_tokens=p99",
    "quantizer: quantizer=int8",
    "chunked prefill: scheduler=chunked_prefill",
    "drafter: drafter=auto",
    "KV format: kv_format=int8",
    "compiled steps, overlap: execution=auto overlap=true",
)
"""The order of the case study, then what it does not have. The text of each is as ``--rung`` takes it."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One change, by name."""

    name: str
    words: Words


@dataclass(frozen=True, slots=True)
class Form:
    """How requests are put to the engine."""

    stream: bool = False
    static_first: bool = False
    """The part that all prompts share comes first; otherwise each prompt's own part does."""
    max_tokens: str = "none"
    """``none``: as long as the workload asks for; ``p99`` of the output lengths that were observed; or a number."""


def parse_rung(text: str) -> Rung:
    """``name: override override``. Raises ``ValueError`` for anything else."""
    name, colon, rest = text.partition(":")
    words = tuple(rest.split())
    if not colon or not name.strip() or not words or not all("=" in word for word in words):
        raise ValueError(f"rung {text!r}: expected NAME: OVERRIDE [OVERRIDE ...], as in 'quantizer: quantizer=int8'")
    form_of(words)
    return Rung(name.strip(), words)


def read_rungs(path: str) -> list[Rung]:
    """A rung a line; empty lines and those that start with # are left out. Raises ``ValueError``."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--rungs {path}: expected a file with a line NAME: OVERRIDE ... for each rung ({error})"
        ) from error
    return [parse_rung(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def check_names(rungs: Sequence[Rung]) -> None:
    """Raises ``ValueError`` for no rungs, or two of one name."""
    names = [rung.name for rung in rungs]
    if not names:
        raise ValueError("no rungs: give --rung 'NAME: OVERRIDE ...' or a file with some (--rungs)")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"rung {twice[0]!r} comes twice: every rung needs a name of its own")


def merged(*parts: Iterable[str]) -> Words:
    """Words one after the other; a later one of the same key replaces the earlier one."""
    found: dict[str, str] = {}
    for word in (word for part in parts for word in part):
        key = word.partition("=")[0].lstrip("+~")
        found.pop(key, None)
        found[key] = word
    return tuple(found.values())


def baseline(overrides: Sequence[str]) -> Words:
    """The ladder's foot: these overrides, of the preset ``baseline`` unless they name one."""
    has_preset = any(word.lstrip("+").startswith("preset=") for word in overrides)
    words = merged(() if has_preset else (BASELINE,), overrides)
    form_of(words)
    return words


def overrides_of(words: Words) -> Words:
    """Those for the engine."""
    return tuple(word for word in words if not word.startswith(WORKLOAD))


def form_of(words: Iterable[str]) -> Form:
    """Raises ``ValueError`` for a key or value that is none of :class:`Form`."""
    values: dict[str, str] = {}
    for word in words:
        if word.startswith(WORKLOAD):
            key, _, values_text = word.removeprefix(WORKLOAD).partition("=")
            values[key] = values_text
    if unknown := values.keys() - {"stream", "static_first", "max_tokens"}:
        raise ValueError(f"{WORKLOAD}{min(unknown)}: expected workload.stream, .static_first or .max_tokens")
    for key in ("stream", "static_first"):
        if values.get(key, "true") not in ("true", "false"):
            raise ValueError(f"{WORKLOAD}{key}={values[key]}: expected true or false")
    limit = values.get("max_tokens", "none")
    if limit not in ("none", P99) and not (limit.isdigit() and int(limit) > 0):
        raise ValueError(f"{WORKLOAD}max_tokens={limit}: expected a whole number of at least 1, p99 or none")
    return Form(values.get("stream") == "true", values.get("static_first") == "true", limit)
