"""From the words of the command to plugin sets: the grid, and what negotiation says of each of its points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec

from engine.assembly.assemble import assemble
from engine.assembly.compose import plugin_settings, swept, usable
from engine.assembly.discovery import discover
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine_lab.eval.plans import LOSSY_SLOTS
from engine_lab.sweep.record import Candidate

OWN = ("server.host", "server.port", "server.api_key")
"""What every engine gets of its own."""
MOST = 512
"""Points of a grid: composing them takes about 0.1 s each."""


def candidates_of(words: Sequence[str], config_dirs: Sequence[Path], keep_equal: bool = False) -> list[Candidate]:
    """Every point of the grid, in its order; those that negotiation refuses have its reasons. ``keep_equal``: sets with
    equal plans are measured each. Raises :class:`AssemblyError` for words that cannot be read, and where every point is
    refused; ``ValueError`` for a grid that is too large."""
    axes = axes_of(words, config_dirs)
    points = list(product(*axes))
    found = [Candidate(i, _name(point, axes), tuple(point)) for i, point in enumerate(points)]
    _tell_apart(found)
    negotiate(found, config_dirs, keep_equal)
    if all(one.refused for one in found):
        raise AssemblyError([one.refused for one in found])
    return found


def negotiate(found: Sequence[Candidate], config_dirs: Sequence[Path], keep_equal: bool = False) -> None:
    """Say of each set why it is refused, or whether another one before it has the same plan."""
    plans: dict[bytes, int] = {}
    for one in found:
        try:
            plan = assemble(one.words, config_dirs=config_dirs, download=True)
        except AssemblyError as error:
            one.refused = "; ".join(error.problems)
            continue
        one.quality_key = _quality_key(plan)
        first = plans.setdefault(essence_of(plan), one.id)
        if first != one.id and not keep_equal:
            one.same_as = first


def axes_of(words: Sequence[str], config_dirs: Sequence[Path]) -> list[tuple[str, ...]]:
    """For each word what it stands for. Raises :class:`AssemblyError` and ``ValueError``."""
    for word in words:
        if word.lstrip("+").partition("=")[0] in OWN:
            raise ValueError(f"{word.partition('=')[0]}: the engines of a sweep listen on loopback; leave it out")
    plain = [word for word in words if word.lstrip("+").startswith("plugins.")]
    discovered = usable(discover(plugin_settings(plain)))
    axes = swept(words, discovered, config_dirs)
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST:
        sizes = " x ".join(str(len(axis)) for axis in axes if len(axis) > 1)
        raise ValueError(f"a grid of {sizes} = {count} plugin sets; expected at most {MOST}: name fewer values")
    return axes


def _name(point: Sequence[str], axes: Sequence[Sequence[str]]) -> str:
    return " ".join(word for word, axis in zip(point, axes, strict=True) if len(axis) > 1) or "as given"


def _tell_apart(found: Sequence[Candidate]) -> None:
    """The same overrides twice get names of their own."""
    seen: Counter[str] = Counter()
    for one in found:
        seen[one.name] += 1
        if seen[one.name] > 1:
            one.name = f"{one.name} ({seen[one.name]})"


def essence_of(plan: EnginePlan) -> bytes:
    """Equal for plans of the same engine, whichever words they come from."""
    slots = {
        slot: [(choice.factory, choice.config, choice.origin) for choice in choices]
        for slot, choices in plan.slots.items()
    }
    return msgspec.json.encode((replace(plan, slots={}, notes=()), slots))


def _quality_key(plan: EnginePlan) -> str:
    chosen = [(choice.factory, choice.config) for slot in LOSSY_SLOTS for choice in plan.slots[slot]]
    return msgspec.json.encode((plan.model.path, plan.dtype, chosen)).decode()
