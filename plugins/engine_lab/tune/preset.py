"""A plugin set as a preset: a file of YAML that selects the same options and sets the same values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from engine.assembly.assemble import configure
from engine.assembly.compose import Composed
from engine.contracts.slots import SLOTS

HEAD = "# @package _global_"


def write_preset(file: Path, words: Sequence[str], config_dirs: Sequence[Path], comments: Sequence[str]) -> None:
    """Write ``DIR/preset/NAME.yaml`` and compose it once. Raises ``OSError``, and ``ValueError`` where the preset would
    not compose to the same configuration."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(preset_text(words, config_dirs, comments), encoding="utf-8")
    again = configure([f"+preset={file.stem}"], [file.parent.parent, *config_dirs]).composed.tree()
    if again != configure(words, config_dirs).composed.tree():
        raise ValueError(f"{file}: the preset does not compose to the same; use the overrides: {' '.join(words)}")


def preset_text(words: Sequence[str], config_dirs: Sequence[Path], comments: Sequence[str]) -> str:
    """Options that are not the default ones, and values that are not those of the options."""
    wanted, default = configure(words, config_dirs).composed, configure([], config_dirs).composed
    chosen = {slot: options_of(wanted, slot) for slot in SLOTS if options_of(wanted, slot) != options_of(default, slot)}
    selected = configure([f"{slot}={_option(slot, names)}" for slot, names in chosen.items()], config_dirs).composed
    values = difference(wanted.tree(), selected.tree())
    lines = [HEAD, *(f"# {line}".rstrip() for line in comments)]
    if chosen:
        lines += ["defaults:", *(f"  - override /{slot}: {_option(slot, names)}" for slot, names in chosen.items())]
    if values:
        lines.append(yaml.safe_dump(values, sort_keys=False).rstrip())
    return "\n".join(lines) + "\n"


def options_of(composed: Composed, slot: str) -> list[str]:
    return [one.requested for one in composed.selections[slot]]


def _option(slot: str, names: Sequence[str]) -> str:
    return f"[{','.join(names)}]" if SLOTS[slot].many else names[0]


def difference(wanted: Any, there: Any) -> Any:
    """The part of a tree that another one has not."""
    if not isinstance(wanted, dict) or not isinstance(there, dict):
        return wanted
    return {key: difference(value, there.get(key)) for key, value in wanted.items() if there.get(key) != value}
