"""Values onto typed nodes, one at a time, with an error text for each that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.assembly import values
from engine.assembly.compose.text import first_line
from engine.assembly.errors import listing, nearest


def structured(cls: type[Any]) -> Any:
    """A typed node for a dataclass. Frozen dataclasses make read-only nodes, so it is thawed."""
    from omegaconf import OmegaConf

    node = OmegaConf.structured(cls)
    _thaw(node)
    return node


def _thaw(node: Any) -> None:
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(node, None)
    for key in node:
        if OmegaConf.is_missing(node, key):
            continue
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _thaw(child)


def plain_values(node: Any) -> Any:
    from omegaconf import OmegaConf

    return values.to_plain(OmegaConf.to_container(node, resolve=True))


def merge(config: Any, plain: Mapping[str, Any], prefix: str) -> list[str]:
    """Merge values from YAML, key by key, so that each mistake is reported."""
    problems = []
    for key, value in plain.items():
        text = f"{prefix}.{key}" if prefix else key
        problems += assign(config, str(key), value, text, f"{text}={value}")
    return problems


def assign(config: Any, key: str, value: Any, full_key: str, shown: str) -> list[str]:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    unknown = _unknown_part(config, key)
    if unknown is not None:
        parent, part, keys = unknown
        where = full_key.removesuffix(key) + parent
        return [f"{shown}: no such key {part!r} in {where.rstrip('.')!r}{nearest(part, keys)} (keys: {listing(keys)})"]
    _name_entries(config, key)
    if value is not None and not isinstance(value, dict) and _is_group(config, key):
        return [f"{shown}: {full_key} is a group of keys ({listing(OmegaConf.select(config, key))}); set those"]
    if isinstance(value, dict) and (_has_typed_entries(config, key) or _is_group(config, key)):
        problems = []
        for part, one in value.items():
            text = f"{full_key}.{part}"
            is_known = _unknown_part(config, f"{key}.{part}") is None  # what is not may be a secret in the wrong place
            problems += assign(config, f"{key}.{part}", one, text, f"{text}={one}" if is_known else text)
        return problems
    try:
        OmegaConf.update(config, key, value, merge=True)
    except (ConfigAttributeError, ConfigKeyError) as error:
        return [f"{shown}: {first_line(error)}"]
    except (OmegaConfBaseException, ValueError) as error:
        return [f"{shown}: {first_line(error)}{_expected(config, key)}"]
    return []


def _name_entries(config: Any, key: str) -> None:
    """Where a dotted key goes into a mapping of dataclasses, give that the entry it names, if it has none."""
    from omegaconf import DictConfig

    node = config
    for part in key.split("."):
        if not isinstance(node, DictConfig) or node._is_none():
            return
        kind = node._metadata.element_type
        if part not in node and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            node[part] = structured(kind)
        node = node._get_node(part)


def _unknown_part(config: Any, key: str) -> tuple[str, str, tuple[str, ...]] | None:
    """``(parent, part, keys of the parent)`` of the first part of a dotted key that no dataclass has."""
    from omegaconf import DictConfig, OmegaConf

    node, parent = config, ""
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return parent, part, ()
        typed, entries = OmegaConf.get_type(node), node._metadata.element_type
        if not dataclasses.is_dataclass(typed):  # a mapping takes any key
            if not (isinstance(entries, type) and dataclasses.is_dataclass(entries)):
                return None
            node, parent = node._get_node(part) if part in node else structured(entries), f"{parent}{part}."
            continue
        keys = tuple(entry.name for entry in dataclasses.fields(typed))
        if part not in keys:
            return parent, part, keys
        node, parent = node._get_node(part), f"{parent}{part}."
    return None


def _has_typed_entries(config: Any, key: str) -> bool:
    """Whether something below is a mapping of dataclasses, whose entries are made one by one."""
    from omegaconf import DictConfig, OmegaConf

    node = OmegaConf.select(config, key)
    if not isinstance(node, DictConfig) or node._is_none():
        return False
    below = [node, *[node._get_node(name) for name in node]]
    return any(isinstance(one, DictConfig) and dataclasses.is_dataclass(one._metadata.element_type) for one in below)


def _is_group(config: Any, key: str) -> bool:
    from omegaconf import DictConfig, OmegaConf

    node = OmegaConf.select(config, key)
    return isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node))


def _expected(config: Any, key: str) -> str:
    """The type a field states, in Python's notation."""
    from omegaconf import OmegaConf

    head, _, last = key.rpartition(".")
    owner = OmegaConf.get_type(OmegaConf.select(config, head) if head else config)
    if not dataclasses.is_dataclass(owner):
        return ""
    kinds = {entry.name: entry.type for entry in dataclasses.fields(owner)}
    kind = kinds.get(last)
    return f"; expected {kind if isinstance(kind, str) else getattr(kind, '__name__', kind)}" if kind else ""
