"""What composing gives: plain settings and one selection per slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.assembly import values
from engine.assembly.records import AUTO
from engine.contracts.config import Settings
from engine.contracts.slots import SLOTS


@dataclass(frozen=True, slots=True)
class Selection:
    """What the configuration asks of one slot."""

    requested: str
    """The option: a plugin's name, a variant's name or ``auto``."""
    plugin: str
    """``name`` or ``dist:name``, or ``auto``."""
    config: Mapping[str, Any]
    """Plain values for the plugin's config dataclass; with ``auto`` only those that were set."""
    candidates: tuple[str, ...] = ()
    """With ``auto``: plugins in order of preference, or ``third_party``."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration as plain data."""

    settings: Settings
    selections: Mapping[str, tuple[Selection, ...]]
    presets: tuple[str, ...] = ()

    def tree(self) -> dict[str, Any]:
        """The whole configuration as nested plain values, as ``engine config`` prints it."""
        tree: dict[str, Any] = dict(values.to_plain(self.settings))
        for slot, chosen in self.selections.items():
            nodes = {pick.requested: _tree_of(pick) for pick in chosen}
            tree[slot] = nodes if SLOTS[slot].many else next(iter(nodes.values()))
        return tree


def _tree_of(pick: Selection) -> dict[str, Any]:
    extra = {"candidates": list(pick.candidates)} if pick.plugin == AUTO else {}
    return {"plugin": pick.plugin, **extra, **pick.config}
