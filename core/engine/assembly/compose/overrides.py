"""Overrides: read with Hydra's grammar, then sorted into presets, choices and assignments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.assembly.compose.catalogue import Catalogue
from engine.assembly.compose.text import first_line
from engine.assembly.errors import listing, nearest
from engine.contracts.config import Settings
from engine.contracts.slots import SLOTS

PRESET = "preset"
SETTING_KEYS = tuple(entry.name for entry in dataclasses.fields(Settings))
ROOT_KEYS = (*SETTING_KEYS, *SLOTS)


def quoted(value: str) -> str:
    """``value`` as the right-hand side of an override, whatever characters it has.

    Inside quotes the grammar takes everything as it is but quotes, and backslashes before a quote or at the end.
    """
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


@dataclass(frozen=True, slots=True)
class Override:
    text: str
    key: str
    value: Any
    deletes: bool
    sweeps: bool
    packaged: bool


def parse(overrides: Sequence[str]) -> tuple[list[Override], list[str]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        try:
            raw = parser.parse_override(text)
            sweeps = raw.is_sweep_override()
            value = None if sweeps or raw.is_delete() else raw.value()
        except HydraException as error:
            problems.append(f"cannot read override {text!r}: {first_line(error)}; expected key=value")
            continue
        parsed.append(Override(text, raw.key_or_group, value, raw.is_delete(), sweeps, raw.package is not None))
    return parsed, problems


@dataclass
class Request:
    """Overrides, sorted by what they do."""

    presets: list[str] = field(default_factory=list)
    choices: dict[str, list[str]] = field(default_factory=dict)
    assignments: list[Override] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[str]:
        chosen = [f"{slot}={_as_option(slot, names)}" for slot, names in self.choices.items()]
        return [*([f"+{PRESET}=[{','.join(self.presets)}]"] if self.presets else []), *chosen]


def _as_option(slot: str, names: Sequence[str]) -> str:
    return f"[{','.join(names)}]" if SLOTS[slot].many else names[0]


def sort(parsed: Sequence[Override], catalogue: Catalogue) -> Request:
    request = Request()
    for one in parsed:
        head = one.key.partition(".")[0].partition("/")[0]
        if one.deletes:
            request.problems.append(f"{one.text}: nothing can be deleted; {_how_to_empty(head)}")
        elif one.sweeps:
            request.problems.append(f"{one.text}: a sweep; one run takes one value (a list is written [a,b])")
        elif head != PRESET and head not in ROOT_KEYS:
            request.problems.append(_unknown_root(one, head, catalogue))
        elif one.packaged or "/" in one.key:
            request.problems.append(f"{one.text}: expected {head}=<option> or {head}.<key>=<value>")
        elif one.key == PRESET:
            request.presets += _names(one, PRESET, catalogue, request.problems)
        elif one.key in SLOTS:
            request.choices[one.key] = _names(one, one.key, catalogue, request.problems)
        elif head == PRESET:
            request.problems.append(f"{one.text}: presets have no keys; choose one with +preset=<name>")
        else:
            request.assignments.append(one)
    _imply_choices(request, catalogue)
    request.choices = {slot: names for slot, names in request.choices.items() if names or SLOTS[slot].many}
    return request


def _imply_choices(request: Request, catalogue: Catalogue) -> None:
    """``drafter.plugin=mine`` alone selects that option too, so that its keys exist."""
    for one in request.assignments:
        slot, _, key = one.key.partition(".")
        if key == "plugin" and slot in SLOTS and not SLOTS[slot].many and slot not in request.choices:
            name = str(one.value).rpartition(":")[2]
            if name in catalogue.options(slot):
                request.choices[slot] = [name]


def _how_to_empty(head: str) -> str:
    if head not in SLOTS:
        return "set another value instead"
    return f"{head}=[] selects none" if SLOTS[head].many else f"{head}=<option> selects another"


def _unknown_root(one: Override, head: str, catalogue: Catalogue) -> str:
    hint = nearest(head, (*ROOT_KEYS, PRESET))
    if not hint and isinstance(one.value, str):
        owners = [group for group in (*SLOTS, PRESET) if one.value in catalogue.options(group)]
        hint = f"; {one.value!r} is an option of {owners[0]}" if owners else ""
    return f"{one.text}: no such key {head!r}{hint or f' (keys: {listing((PRESET, *ROOT_KEYS))})'}"


def _names(one: Override, group: str, catalogue: Catalogue, problems: list[str]) -> list[str]:
    """The option names an override gives, those that exist."""
    many = group == PRESET or SLOTS[group].many
    known = catalogue.options(group)
    given = one.value if isinstance(one.value, list) else [one.value]
    if isinstance(one.value, list) and not many:
        problems.append(f"{one.text}: {group} takes exactly one option ({listing(known)})")
        return []
    found = []
    for name in given:
        if isinstance(name, str) and name in known:
            found.append(name)
            continue
        shown = "null" if name is None else str(name)
        problems.append(
            f"{group}={shown}: no such {'preset' if group == PRESET else group + ' option'}"
            f"{nearest(shown, known)} (options: {listing(known)}){catalogue.notes(group, shown)}"
        )
    return found
