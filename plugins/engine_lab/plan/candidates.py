"""What else could be set: overrides that are tried by simulation, and layouts of several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """Overrides to add, and what they trade."""

    overrides: tuple[str, ...]
    trade: str


CANDIDATES = (
    Candidate(("quantizer=fp8",), "a byte for each weight; less exact, so run engine eval"),
    Candidate(("quantizer=int8",), "a byte for each weight; less exact, so run engine eval"),
    Candidate(("quantizer=int4",), "half a byte for each weight; less exact, so run engine eval"),
    Candidate(("kv_format=fp8",), "half the bytes of cached tokens: more requests at once"),
    Candidate(("kv_format=int8",), "half the bytes of cached tokens: more requests at once"),
    Candidate(("scheduler.max_requests=128",), "more requests at once, each a little slower"),
    Candidate(("scheduler.max_requests=8",), "fewer requests at once, each faster; others wait"),
    Candidate(("scheduler.token_budget=512",), "shorter steps: prompts hold up others less, and take longer"),
    Candidate(("scheduler.token_budget=8192",), "longer steps: prompts are done sooner and hold up others more"),
    Candidate(("kv_allocator=prefix_cache",), "shared prefixes are computed once"),
)
"""Drafters are not among them: what they gain depends on how many drafts the text lets them guess."""
SMALLER = tuple(each for each in CANDIDATES if each.overrides[0].startswith(("kv_format=", "quantizer=")))
"""Of them: those that take less memory."""
LENGTHS = ("model.max_len=", "memory.kv_tokens=")
"""Overrides that say how many tokens the KV pool holds at least."""
LAYOUTS = tuple(
    Candidate((f"parallelism.tp={tp}",), f"{tp} devices share out every layer") for tp in (2, 4, 8)
)  # fmt: skip


def combined(overrides: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """``more`` in place of those that set the same."""
    keys = {word.partition("=")[0].lstrip("+") for word in more}
    return (*(word for word in overrides if word.partition("=")[0].lstrip("+") not in keys), *more)
