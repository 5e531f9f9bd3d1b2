"""From overrides to plain settings and one selection per slot: the only package that knows Hydra and OmegaConf.

Hydra's grammar reads the overrides and Hydra composes the groups (defaults, presets, variants); then each group's
values are merged onto its plugin's config dataclass, and value overrides are applied one by one so that every
mistake is found in one go. What leaves this package is plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.assembly import values
from engine.assembly.compose.catalogue import Catalogue, conf_dir
from engine.assembly.compose.composer import Composer, usable
from engine.assembly.compose.overrides import PRESET, parse, quoted, sort
from engine.assembly.compose.result import apply, finish
from engine.assembly.compose.selection import Composed, Selection
from engine.assembly.compose.sweeps import alternatives
from engine.assembly.compose.typed import plain_values, structured
from engine.assembly.discovery import Discovered
from engine.assembly.errors import AssemblyError
from engine.assembly.records import AUTO
from engine.contracts.config import PluginSettings
from engine.contracts.slots import SLOTS

__all__ = [
    "AUTO",
    "PRESET",
    "Composed",
    "Selection",
    "compose",
    "conf_dir",
    "options",
    "plugin_settings",
    "quoted",
    "swept",
    "usable",
]


def plugin_settings(overrides: Sequence[str]) -> PluginSettings:
    """``plugins.*`` from the overrides alone: they decide what is loaded, so they are needed before composing.

    Raises :class:`AssemblyError`.
    """
    relevant = [text for text in overrides if text.lstrip("+").startswith("plugins.")]
    if not relevant:
        return PluginSettings()
    parsed, problems = parse(relevant)
    config = structured(PluginSettings)
    for one in parsed:
        problems += apply(config, one.key.removeprefix("plugins."), one, "plugins", one.key)
    if problems:
        raise AssemblyError(problems)
    built: PluginSettings = values.build(PluginSettings, plain_values(config))
    return built


def compose(overrides: Sequence[str], discovered: Discovered, config_dirs: Sequence[Path] = ()) -> Composed:
    """Compose the configuration. ``discovered`` is :func:`usable`. Raises :class:`AssemblyError` with every mistake it
    found."""
    parsed, problems = parse(overrides)
    composer = Composer(discovered, parsed, config_dirs)
    request = sort(parsed, composer)
    problems += request.problems
    if problems:
        raise AssemblyError(problems)
    root, choices = composer.compose(request.groups)
    composed = finish(root, choices, request, composer)
    if composed.settings.plugins != plugin_settings(overrides):
        raise AssemblyError(["plugins.* decide what is loaded, so they can only be given as overrides, not in YAML"])
    return composed


def options(discovered: Discovered, config_dirs: Sequence[Path] = ()) -> dict[str, tuple[str, ...]]:
    """The options of every slot and of ``preset``, without composing anything."""
    catalogue = Catalogue(discovered, config_dirs)
    return {group: catalogue.options(group) for group in (*SLOTS, PRESET)}


def swept(overrides: Sequence[str], discovered: Discovered, config_dirs: Sequence[Path] = ()) -> list[tuple[str, ...]]:
    """For each override those that it stands for, in Hydra's sweep syntax: ``drafter=a,b``, ``drafter=*``,
    ``a.b=range(1,9,2)``. Nothing is composed. Raises :class:`AssemblyError`."""
    return alternatives(overrides, Catalogue(discovered, config_dirs))
