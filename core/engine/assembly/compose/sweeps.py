"""What an override of Hydra's sweep syntax stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.assembly.compose.catalogue import Catalogue
from engine.assembly.compose.text import first_line
from engine.assembly.errors import AssemblyError, listing
from engine.assembly.records import AUTO


def alternatives(overrides: Sequence[str], catalogue: Catalogue) -> list[tuple[str, ...]]:
    """For each override the overrides that it stands for: itself, or one for each value of ``a,b``, ``choice(...)``,
    ``range(...)`` or, of a group's options, ``glob(...)``. ``drafter=*`` is short for ``drafter=glob(*)``. ``auto`` is
    one of the other options, and no glob has it. Raises :class:`AssemblyError` with every mistake it found."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=_Options(catalogue))
    found: list[tuple[str, ...]] = []
    problems: list[str] = []
    for text in overrides:
        try:
            (raw,) = parser.parse_overrides([f"{text[:-1]}glob(*)" if text.endswith("=*") else text])
            if not raw.is_sweep_override():
                found.append((text,))
            elif not raw.is_discrete_sweep():
                problems.append(f"{text}: expected values to try, as a,b or choice(a,b) or range(1,9,2)")
            else:
                found.append(tuple(f"{raw.get_key_element()}={value}" for value in raw.sweep_string_iterator()))
                if not found[-1]:
                    known = catalogue.options(raw.key_or_group)
                    problems.append(f"{text}: stands for nothing (options: {listing(known)})")
        except HydraException as error:
            problems.append(f"cannot read override {text!r}: {first_line(error)}; expected key=value or key=a,b")
    if problems:
        raise AssemblyError(problems)
    return found


@dataclass(frozen=True, slots=True)
class _Options:
    """As much of Hydra's loader as a glob asks."""

    catalogue: Catalogue

    def get_group_options(self, group: str, **rest: Any) -> list[str]:
        return [name for name in self.catalogue.options(group) if name != AUTO]
