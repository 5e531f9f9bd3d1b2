"""``engine plugins show``: what one plugin is, what it needs, and what it can be told."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from engine.assembly import values
from engine.assembly.assemble import configure, plan_for
from engine.assembly.device_facts import device_facts
from engine.assembly.discovery import Discovered, Offer, discover
from engine.assembly.errors import AssemblyError
from engine.cli.plugins.docstrings import as_markdown, field_docs, where_is
from engine.cli.plugins.named import HELP, find_offer, selecting, shown
from engine.cli.serve import overrides_of, shorthands
from engine.contracts.command import OK, Command
from engine.contracts.slots import SLOTS


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a plugin's configuration."""

    key: str
    """As overrides name it."""
    type: str
    default: Any
    required: bool
    """There is no default."""
    doc: str


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of a plugin without importing it."""

    plugin: str
    """``slot=name``"""
    doc: str
    about: str
    """What its source says."""
    origin: str
    """Distribution and version."""
    factory: str
    file: str
    provides: tuple[str, ...]
    requires: dict[str, tuple[str, ...]]
    asked_for: str
    """The model and the device that it was judged against."""
    reasons_against: tuple[str, ...]
    """Why a plan with it is refused; empty: it is not."""
    select: str
    contract: str
    suite: str
    """Empty: the slot has none."""
    configuration: tuple[Key, ...]


def describe(offer: Offer, discovered: Discovered, overrides: list[str], flags: argparse.Namespace) -> Shown:
    """Raises :class:`AssemblyError` for overrides that are none."""
    select = selecting(offer, discovered)
    asked_for, reasons = _judged(offer, [*select, *overrides_of(flags, overrides)], flags)
    file, about = _source(offer.provider.factory)
    return Shown(
        plugin=shown(offer),
        doc=offer.provider.doc,
        about=about,
        origin=str(offer.origin),
        factory=offer.provider.factory,
        file=file,
        provides=tuple(offer.provider.provides),
        requires={slot: tuple(needs) for slot, needs in offer.provider.requires.items()},
        asked_for=asked_for,
        reasons_against=reasons,
        select=shlex.join(["engine", "serve", *select]),
        contract=f"engine.contracts.{offer.slot}",
        suite=offer.provider.suite or _suite(offer.slot),
        configuration=tuple(keys(offer)),
    )


def keys(offer: Offer) -> Iterator[Key]:
    """Fields of the config dataclass, in their order."""
    prefix = f"{offer.slot}.{offer.name}" if SLOTS[offer.slot].many else offer.slot
    docs = field_docs(offer.config_class)
    for field in dataclasses.fields(offer.config_class):
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        required = made is dataclasses.MISSING
        default = None if required else values.to_plain(made)
        yield Key(f"{prefix}.{field.name}", kind, default, required, as_markdown(docs.get(field.name, "")))


def _judged(offer: Offer, words: list[str], flags: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    """The model and device, and why no plan has this plugin with them."""
    configured = configure(words, flags.config_dir)
    asked = configured.composed.settings
    try:
        what = f"{asked.model.path} on {device_facts(asked.device).kind}"
    except AssemblyError:  # one that is not there: among the reasons
        what = f"{asked.model.path} on {asked.device}"
    try:
        plan_for(configured)
    except AssemblyError as error:
        return what, error.problems
    return what, ()


def _source(factory: str) -> tuple[str, str]:
    try:
        file, about = where_is(factory)
    except Exception as error:  # importing a third party's package may fail in any way; selecting it says more
        return f"cannot be found: {type(error).__name__}: {error}", ""
    return file, as_markdown(about)


def _suite(slot: str) -> str:
    module = f"engine.testing.{slot}"
    return module if find_spec(module) is not None else ""


def _print(plugin: Shown) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    print(f"{plugin.plugin}: {plugin.doc}\n")
    if plugin.about and plugin.about != plugin.doc:
        print(textwrap.indent(plugin.about, "  "), end="\n\n")
    fits = "\n".join(plugin.reasons_against) or "yes"
    requires = "; ".join(f"{slot} with {', '.join(needs)}" for slot, needs in plugin.requires.items())
    lines = {
        "from": f"{plugin.origin}, {plugin.file}",
        "factory": plugin.factory,
        "provides": ", ".join(plugin.provides) or "-",
        "requires": requires or "-",
        f"serves {plugin.asked_for}": fits,
        "select": plugin.select,
        "check": f"engine plugins check {plugin.plugin}" + f" ({plugin.suite})" * bool(plugin.suite),
        "contract": f"{plugin.contract} (python -m pydoc {plugin.contract}, or docs/reference.md)",
    }
    left = max(map(len, lines)) + 2
    for name, text in lines.items():
        print(f"{name:<{left}}" + textwrap.indent(text, " " * left).lstrip())
    print()
    _print_keys(plugin.configuration, width)


def _print_keys(configuration: tuple[Key, ...], width: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not configuration:
        print("It has no configuration.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("key", "type", "default"):
        table.add_column(column, no_wrap=column == "key", overflow="fold")
    table.add_column("what it does", overflow="fold")
    for key in configuration:
        table.add_row(key.key, key.type, "must be set" if key.required else json.dumps(key.default), key.doc)
    Console(width=width, highlight=False, markup=False).print(table)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="PLUGIN", help=HELP)
    shorthands(parser)
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    discovered = discover()
    plugin = describe(find_offer(flags.name, discovered), discovered, overrides, flags)
    if flags.json:
        print(json.dumps(dataclasses.asdict(plugin), indent=2))
    else:
        _print(plugin)
    return OK


COMMAND = Command(
    "Show a plugin: what it is, where it is from, its configuration, and whether it serves a model on a device.",
    _run,
    _flags,
    notes="Model and device are those of the overrides: --model DIR, device=cpu.",
)
