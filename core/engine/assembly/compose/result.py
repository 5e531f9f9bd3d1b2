"""From the composed tree and the assignments to typed, plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from engine.assembly import values
from engine.assembly.compose.catalogue import Catalogue
from engine.assembly.compose.overrides import ROOT_KEYS, SETTING_KEYS, Override, Request
from engine.assembly.compose.selection import Composed, Selection
from engine.assembly.compose.typed import assign, merge, plain_values, structured
from engine.assembly.discovery import Offer
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.assembly.records import AUTO
from engine.contracts.config import Settings
from engine.contracts.slots import SLOTS
from engine.plugin_guard.calls import error_line


def finish(root: Any, choices: Mapping[str, Any], request: Request, catalogue: Catalogue) -> Composed:
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(root, resolve=True)
    assert isinstance(tree, dict)
    problems = [_unknown_key(str(key)) for key in tree if key not in ROOT_KEYS]
    if plain := {slot: node for slot in SLOTS if not isinstance(node := tree.get(slot) or {}, dict)}:
        problems += [
            f"{slot}={node}: a file of YAML selects plugins in its list 'defaults': - override /{slot}: {node}"
            for slot, node in plain.items()
        ]
        raise AssemblyError(problems)
    settings = _settings(tree, request.assignments, problems)
    selections = {
        slot: _selections(slot, choices, tree.get(slot) or {}, request, catalogue, problems) for slot in SLOTS
    }
    if problems or settings is None:
        raise AssemblyError(problems)
    return Composed(settings, selections, tuple(request.presets))


def _unknown_key(key: str) -> str:
    """A folder's name is one where a file of it does not say that its keys are those of the whole configuration."""
    hint = "; the first line of a preset is '# @package _global_'" if key == "preset" else nearest(key, ROOT_KEYS)
    return f"{key}: no such key{hint} (set by YAML)"


def _settings(tree: Mapping[str, Any], assignments: Sequence[Override], problems: list[str]) -> Settings | None:
    config = structured(Settings)
    ours = {key: value for key, value in tree.items() if key in SETTING_KEYS}
    problems += merge(config, ours, "")
    for one in assignments:
        if one.key.partition(".")[0] in SETTING_KEYS:
            problems += apply(config, one.key, one, "", one.key)
    return _checked_settings(plain_values(config), problems)


def _checked_settings(plain: dict[str, Any], problems: list[str]) -> Settings | None:
    """Each part on its own, so that one bad value does not hide the next."""
    parts: dict[str, Any] = {}
    default = Settings()
    for key, value in plain.items():
        part = getattr(default, key)
        if dataclasses.is_dataclass(part):
            try:
                parts[key] = values.build(type(part), value)
            except ValueError as error:
                problems.append(str(error))
        else:
            parts[key] = value
    try:
        return Settings(**parts)
    except ValueError as error:
        problems.append(str(error))
        return None


def _selections(
    slot: str,
    choices: Mapping[str, Any],
    node: Any,
    request: Request,
    catalogue: Catalogue,
    problems: list[str],
) -> tuple[Selection, ...]:
    mine = [one for one in request.assignments if one.key.partition(".")[0] == slot]
    if not SLOTS[slot].many:
        requested = str(choices.get(slot) or node.get("plugin", ""))
        return (_selection(slot, slot, requested, node, mine, catalogue, problems),)
    for one in mine:
        instance = one.key.split(".")[1]
        if instance not in node:
            problems.append(
                f"{one.text}: {slot} {instance!r} is not selected{nearest(instance, node)} "
                f"(selected: {listing(node)}; select with {slot}=[{','.join([*node, instance])}])"
            )
    return tuple(
        _selection(
            slot,
            f"{slot}.{name}",
            name,
            part,
            [one for one in mine if one.key.startswith(f"{slot}.{name}.")],
            catalogue,
            problems,
        )
        for name, part in node.items()
    )


def _selection(
    slot: str,
    prefix: str,
    requested: str,
    node: Mapping[str, Any],
    assignments: Sequence[Override],
    catalogue: Catalogue,
    problems: list[str],
) -> Selection:
    plain = dict(node)
    picks = [one for one in assignments if one.key == f"{prefix}.plugin"]
    plugin = str(picks[-1].value) if picks else str(plain.get("plugin") or requested)
    plain.pop("plugin", None)
    orders = [one for one in assignments if one.key == f"{prefix}.candidates"]
    candidates = _candidates(prefix, plugin, plain, orders, catalogue, problems)
    cls, offer = catalogue.schema(slot, plugin)
    if offer is None and plugin != AUTO:
        return Selection(requested or plugin, plugin, plain)
    config = structured(cls)
    problems += merge(config, plain, prefix)
    values_set = [one for one in assignments if one not in picks and one not in orders]
    explicit = set(plain)
    for one in values_set:
        key = one.key.removeprefix(f"{prefix}.")
        problems += apply(config, key, one, prefix, plugin)
        explicit.add(key.partition(".")[0])
    merged = plain_values(config)
    if plugin == AUTO:
        merged = {key: value for key, value in merged.items() if key in explicit}
    _check_values(cls, merged, prefix, offer, problems)
    return Selection(requested, plugin, merged, candidates)


def _candidates(
    prefix: str,
    plugin: str,
    plain: dict[str, Any],
    orders: Sequence[Override],
    catalogue: Catalogue,
    problems: list[str],
) -> tuple[str, ...]:
    """What ``auto`` may choose: as the last override says, else as YAML does, whose key is taken out of ``plain``."""
    in_yaml = "candidates" in plain
    given = plain.pop("candidates", [])
    text = f"{prefix}.candidates={given} (set by YAML)"
    if orders:
        given, text = orders[-1].value, orders[-1].text
    if plugin != AUTO:
        if in_yaml or orders:
            use = f"; use {prefix}={AUTO}, or leave them out" if AUTO in catalogue.options(prefix) else ""
            problems.append(f"{text}: {prefix}={plugin} names a plugin, and only {AUTO} has candidates{use}")
        return ()
    if isinstance(given, list) and all(isinstance(name, str) and name for name in given):
        return tuple(dict.fromkeys(given))
    problems.append(f"{text}: expected a list of plugin names, like [cpu,torch]")
    return ()


def _check_values(cls: type[Any], plain: dict[str, Any], prefix: str, offer: Offer | None, problems: list[str]) -> None:
    who = f"{offer.slot}={offer.name} of {offer.origin}" if offer else cls.__name__
    unset = [key for key, value in plain.items() if value == "???"]
    if unset:
        problems.extend(f"{prefix}.{key}: {who} has no default for it; set {prefix}.{key}=<value>" for key in unset)
        return
    try:
        values.build(cls, plain)
    except ValueError as error:
        text = str(error)
        problems.append(text if text.startswith(prefix) else f"{prefix}: {who} refuses its configuration: {text}")
    except Exception as error:  # __post_init__ of a third party may raise anything; it is named
        problems.append(f"{prefix}: the config of {who} raised {error_line(error)}")


def apply(config: Any, key: str, one: Override, prefix: str, owner: str) -> list[str]:
    return assign(config, key, one.value, f"{prefix}.{key}" if prefix else key, one.text.lstrip("+"))
