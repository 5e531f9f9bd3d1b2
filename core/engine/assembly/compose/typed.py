"""Values onto typed nodes, one at a time, with an error text for each that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, get_origin

from engine.assembly import values
from engine.assembly.compose.text import first_line
from engine.assembly.errors import listing, nearest


def structured(cls: type[Any]) -> Any:
    """A typed node for a dataclass."""
    hashable: Any = cls
    return deepcopy(_made(hashable))  # faster than making it again


@lru_cache(maxsize=256)
def _made(cls: type[Any]) -> Any:
    """Frozen dataclasses make read-only nodes, so it is thawed."""
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
    """Merge values from YAML, key by key, so that each mistake is reported. Most are defaults, and there."""
    problems, there = [], plain_values(config)
    for key, value in plain.items():
        if key in there and _same(value, there[key]):
            continue
        text = f"{prefix}.{key}" if prefix else key
        problems += assign(config, str(key), value, text, f"{text}={value}")
    return problems


def _same(a: Any, b: Any) -> bool:
    """Equal, and of the same types: ``True`` is no 1."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def assign(config: Any, key: str, value: Any, full_key: str, shown: str) -> list[str]:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    _name_entries(config, key)
    unknown = _unknown_part(config, key)
    if unknown is not None:
        parent, part, keys = unknown
        where = (full_key.removesuffix(key) + parent).rstrip(".")  # without the value, which may be a secret
        return [f"{full_key}: no such key {part!r} in {where!r}{nearest(part, keys)} (keys: {listing(keys)})"]
    if parts := _name_with_dots(config, key):
        mapping, name = full_key.removesuffix(key) + parts[0], parts[1]
        return [f"{shown}: a dot ends a name; write {mapping}={{{name}: ...}}"]
    if value is not None and not isinstance(value, dict) and _is_group(config, key):
        return [f"{shown}: {full_key} is a group of keys ({listing(OmegaConf.select(config, key))}); set those"]
    if isinstance(value, dict) and (_is_group(config, key) or _has_typed_entries(config, key)):
        problems = []
        for part, one in value.items():
            if "." in str(part):
                problems.append(f"{full_key}: {part!r}: expected a name without a dot")
                continue
            problems += assign(config, f"{key}.{part}", one, f"{full_key}.{part}", f"{full_key}.{part}={one}")
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
        node = node._get_node(part) if part in node else None


def _unknown_part(config: Any, key: str) -> tuple[str, str, tuple[str, ...]] | None:
    """``(parent, part, keys of the parent)`` of the first part of a dotted key that no dataclass has."""
    from omegaconf import DictConfig, OmegaConf

    node, parent = config, ""
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return parent, part, ()
        typed = OmegaConf.get_type(node)
        if dataclasses.is_dataclass(node._metadata.element_type):
            node, parent = node._get_node(part), f"{parent}{part}."
            continue
        if not dataclasses.is_dataclass(typed):
            return None  # a free mapping takes any key
        keys = tuple(entry.name for entry in dataclasses.fields(typed))
        if part not in keys:
            return parent, part, keys
        node, parent = node._get_node(part), f"{parent}{part}."
    return None


def _name_with_dots(config: Any, key: str) -> tuple[str, str] | None:
    """``(mapping, name)`` of a dotted key that goes below an entry that is no group: a dot is taken to end a name."""
    from omegaconf import DictConfig, OmegaConf

    parts = key.split(".")
    for count in range(1, len(parts) - 1):
        node = OmegaConf.select(config, ".".join(parts[:count]))
        kind = node._metadata.element_type if isinstance(node, DictConfig) else None
        if kind is str or get_origin(kind) is list:
            return ".".join(parts[:count]), ".".join(parts[count:])
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
