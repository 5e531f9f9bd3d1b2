"""Are the records with which plugins describe themselves what the core takes them for?

Who reads a message is not always the plugin's author: it is one line that shows the value and what was expected.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from engine.contracts.command import CommandProvider
from engine.contracts.provider import PLUGIN_API, Provider
from engine.contracts.slots import SLOTS
from engine.plugin_guard.calls import quote

AUTO = "auto"
"""The option that lets the engine choose, and the plugin name it carries."""
THIRD_PARTY = "third_party"
"""Among the candidates of ``auto``: the plugins of other distributions that state an ``unsupported`` of their own."""
RESERVED_NAMES = frozenset({AUTO, THIRD_PARTY})
RESERVED_FIELDS = frozenset({"plugin", "candidates"})
"""Keys that every slot has beside those of its plugin."""
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_COMMAND_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


def provider_error(slot: str, provider: Provider) -> str:
    """Why this record cannot be used; empty when it can."""
    return (
        _record_error(provider.name, _NAME, f"and '_', and not {' or '.join(sorted(RESERVED_NAMES))}", provider.api)
        or _factory_error(provider.factory)
        or _capabilities_error("provides", provider.provides)
        or _requires_error(provider.requires)
        or _config_error(slot, provider.config)
        or _unsupported_error(provider.unsupported)
        or _doc_error(provider.doc)
        or (_factory_error(provider.suite, "suite") if provider.suite != "" else "")
        or (_factory_error(provider.sources, "sources") if provider.sources != "" else "")
    )


def command_error(provider: object) -> str:
    """Why this record of a command cannot be used; empty when it can."""
    if not isinstance(provider, CommandProvider):
        return f"engine_command gave a {type(provider).__name__}, expected a CommandProvider"
    wrong = (
        _doc_error(provider.doc)
        or _record_error(provider.name, _COMMAND_NAME, "'_' and '-'", provider.api)
        or _factory_error(provider.command)
    )
    return wrong and f"command {quote(provider.name)}: {wrong}"


def reasons_of(returned: object, who: str) -> tuple[str, ...]:
    """The reasons that ``who``, an ``unsupported()``, returned, each on one line; or what is wrong with them."""
    if isinstance(returned, str):
        return (f"{who} returned {quote(returned)}; expected a tuple of reasons, ({quote(returned)},)",)
    if not isinstance(returned, tuple | list) or not all(isinstance(one, str) and one.strip() for one in returned):
        return (f"{who} returned {quote(returned)}; expected a tuple of reasons, empty when there are none",)
    return tuple(" ".join(reason.split()) for reason in returned)


def _record_error(name: object, allowed: re.Pattern[str], others: str, api: object) -> str:
    """What plugins and commands have in common."""
    match api:
        case (int(major), int(minor)):
            if major != PLUGIN_API[0] or minor > PLUGIN_API[1]:
                return f"needs plugin API {major}.{minor}, this engine has {PLUGIN_API[0]}.{PLUGIN_API[1]}"
        case _:
            return f"api {quote(api)}: expected two numbers, like {PLUGIN_API}"
    if not isinstance(name, str) or not allowed.match(name) or name in RESERVED_NAMES:
        return f"name {quote(name)}: expected lower-case letters, digits {others}"
    return ""


def _factory_error(factory: object, what: str = "factory") -> str:
    if isinstance(factory, str) and _FACTORY.match(factory):
        return ""
    return f"{what} {quote(factory)}: expected 'package.module:attribute'"


def _capabilities_error(what: str, given: object) -> str:
    if isinstance(given, str):
        return f"{what} {quote(given)}: expected a tuple of capabilities, ({quote(given)},)"
    if isinstance(given, tuple | list | set | frozenset) and all(isinstance(one, str) and one for one in given):
        return ""
    return f"{what} {quote(given)}: expected a tuple of capabilities, like ('paged',)"


def _requires_error(requires: object) -> str:
    if not isinstance(requires, Mapping):
        return f"requires {quote(requires)}: expected capabilities by slot, like {{'kv_allocator': ('paged',)}}"
    unknown = [quote(slot) for slot in requires if slot not in SLOTS]
    if unknown:
        return f"requires names no slot: {', '.join(unknown)}"
    wrong = (_capabilities_error(f"requires[{slot!r}]", needs) for slot, needs in requires.items())
    return next(filter(None, wrong), "")


def _config_error(slot: str, config: Any) -> str:
    if config is None:
        return ""
    base = SLOTS[slot].config
    if not (isinstance(config, type) and issubclass(config, base)):
        return (
            f"config {quote(config)}: expected a frozen dataclass derived from engine.contracts.config.{base.__name__}"
        )
    lost = _undeclared(config)
    if lost:
        return f"config {config.__name__}: its fields {', '.join(lost)} are not read without @dataclass(frozen=True)"
    taken = sorted(RESERVED_FIELDS.intersection(entry.name for entry in dataclasses.fields(config)))
    if taken:
        return f"config {config.__name__}: every {slot} has the key {taken[0]!r} already; give its field another name"
    return ""


def _undeclared(config: type[Any]) -> list[str]:
    """Annotations of a subclass that nobody made a dataclass: its base's fields hide that they are none."""
    if "__dataclass_fields__" in vars(config):
        return []
    return [name for name, kind in inspect.get_annotations(config).items() if "ClassVar" not in str(kind)]


def _unsupported_error(unsupported: object) -> str:
    return "" if callable(unsupported) else f"unsupported {quote(unsupported)}: expected a function of (model, device)"


def _doc_error(doc: object) -> str:
    return "" if isinstance(doc, str) and len(doc.splitlines()) <= 1 else f"doc {quote(doc)}: expected one line"
