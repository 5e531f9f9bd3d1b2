"""Config dataclasses from plain values and back: what the plan carries as JSON."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import PurePath
from typing import Any

import msgspec


def to_plain(value: Any) -> Any:
    """Dataclasses, enums and paths as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # msgspec leaves out fields that it had filled with a default itself
        value = dataclasses.asdict(value)
    return msgspec.to_builtins(value, enc_hook=_encode)


def build(cls: type[Any], values: dict[str, Any]) -> Any:
    """An instance of the dataclass ``cls``. Raises ``ValueError`` with a text for the user."""
    try:
        return msgspec.convert(values, cls, dec_hook=_decode)
    except msgspec.ValidationError as error:
        # A __post_init__ that refused a value arrives as the cause, in its own words.
        if isinstance(error.__cause__, ValueError):
            raise ValueError(str(error.__cause__)) from error
        raise ValueError(str(error)) from error


def class_path(cls: type[Any]) -> str:
    """``package.module:Class``"""
    return f"{cls.__module__}:{cls.__qualname__}"


def load(path: str) -> Any:
    """The object at ``package.module:attribute``. Raises ``ImportError`` or ``AttributeError``."""
    module, _, attribute = path.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be part of a plan")


def _decode(kind: type[Any], value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return kind(value)
    raise NotImplementedError(f"{kind!r} cannot be part of a configuration")
