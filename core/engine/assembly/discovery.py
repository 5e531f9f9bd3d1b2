"""Which plugins are installed, and what do they offer?

The only user of pluggy; nothing of it runs once an engine is assembled. A plugin that cannot be loaded is recorded with
its origin and the stage at which it failed; the others go on. Selecting something that failed is what stops start-up.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pluggy

from engine import hookspecs
from engine.assembly.records import command_error, provider_error
from engine.contracts.command import CommandProvider
from engine.contracts.config import PluginSettings
from engine.contracts.provider import PLUGIN_API, Provider
from engine.contracts.slots import SLOTS, Slot
from engine.plugin_guard.calls import error_line, quote

OWN_DISTRIBUTION = "engine"
GROUP_STEM = "engine.plugins.v"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin comes from."""

    dist: str
    version: str
    entry: str
    """Name of the entry point."""

    def __str__(self) -> str:
        return f"{self.dist} {self.version}"


@dataclass(frozen=True, slots=True)
class Offer:
    """One plugin for one slot, and who offers it."""

    slot: str
    provider: Provider
    origin: Origin

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def qualified(self) -> str:
        """``dist:name``, unique even when two distributions offer the same name."""
        return f"{self.origin.dist}:{self.name}"

    @property
    def is_third_party(self) -> bool:
        return self.origin.dist != OWN_DISTRIBUTION

    @property
    def config_class(self) -> type[Any]:
        return self.provider.config or SLOTS[self.slot].config


@dataclass(frozen=True, slots=True)
class CommandOffer:
    """One subcommand, and who offers it."""

    provider: CommandProvider
    origin: Origin

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def qualified(self) -> str:
        """``dist:name``, unique even when two distributions offer the same name."""
        return f"{self.origin.dist}:{self.name}"


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that is installed but cannot be used."""

    origin: Origin
    stage: str
    """``version``, ``import``, ``hooks``, ``call`` or ``provider``."""
    error: str
    slot: str = ""
    name: str = ""
    """Of the provider, where it got that far."""

    def __str__(self) -> str:
        what = f" {self.slot}={self.name}" if self.name else ""
        return f"plugin {self.origin.entry!r} of {self.origin}{what} failed ({self.stage}): {self.error}"


@dataclass(frozen=True, slots=True)
class SearchPath:
    """A folder of YAML a plugin brings, as a Hydra search path."""

    path: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Discovered:
    """Everything that is installed."""

    offers: tuple[Offer, ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    searchpaths: tuple[SearchPath, ...] = ()
    commands: tuple[CommandOffer, ...] = ()
    switched_off: tuple[Origin, ...] = ()
    """Left out by ``plugins.third_party``, ``plugins.allow`` or ``plugins.disable``."""

    def of_slot(self, slot: str) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.offers if offer.slot == slot)

    def named(self, slot: str, name: str) -> tuple[Offer, ...]:
        """Offers that ``name`` (``plugin`` or ``dist:plugin``) may mean; more than one is ambiguous."""
        return tuple(offer for offer in self.of_slot(slot) if name in (offer.name, offer.qualified))

    def names(self, slot: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(offer.name for offer in self.of_slot(slot)))


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """An entry point of a group ``engine.plugins.v<major>``."""

    origin: Origin
    group: str
    target: Any
    """Something with ``load() -> module``."""


def installed_entries() -> Iterator[PluginEntry]:
    """Entry points of all installed distributions, any major version, first on ``sys.path`` wins."""
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        name = dist.name
        if name is None or name.lower() in seen:
            continue
        seen.add(name.lower())
        for entry in dist.entry_points:
            if entry.group.startswith(GROUP_STEM):
                yield PluginEntry(Origin(name, dist.version, entry.name), entry.group, entry)


def discover(settings: PluginSettings | None = None, entries: Iterable[PluginEntry] | None = None) -> Discovered:
    """Load the plugins that ``settings`` permits. Never raises because of a plugin."""
    settings = settings or PluginSettings()
    found = _Findings()
    for entry in installed_entries() if entries is None else entries:
        if not _permitted(entry.origin.dist, settings):
            found.switched_off.append(entry.origin)
        elif entry.group != hookspecs.ENTRY_POINT_GROUP:
            spoken = entry.group.removeprefix(GROUP_STEM)
            found.fail(entry.origin, "version", f"built for plugin API {spoken}, this engine speaks {PLUGIN_API[0]}")
        else:
            found.load(entry)
    return found.frozen()


def _permitted(dist: str, settings: PluginSettings) -> bool:
    if dist.lower() == OWN_DISTRIBUTION:
        return True
    off = {_canonical(name) for name in settings.disable}
    if not settings.third_party or _canonical(dist) in off:
        return False
    return settings.allow is None or _canonical(dist) in {_canonical(name) for name in settings.allow}


def _canonical(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()


def _spec_of(slot: Slot) -> ModuleType:
    """The hook of a slot that :mod:`engine.hookspecs` does not document."""

    def spec() -> list[Provider]: ...  # type: ignore[empty-body]

    module = ModuleType(slot.hook)
    setattr(module, slot.hook, hookspecs.hookspec(spec))
    return module


class _Findings:
    """What :func:`discover` has seen so far."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        for slot in SLOTS.values():
            if not hasattr(hookspecs, slot.hook):
                self.manager.add_hookspecs(_spec_of(slot))
        self.offers: list[Offer] = []
        self.failures: list[PluginFailure] = []
        self.searchpaths: list[SearchPath] = []
        self.commands: list[CommandOffer] = []
        self.switched_off: list[Origin] = []

    def frozen(self) -> Discovered:
        return Discovered(
            tuple(self.offers),
            tuple(self.failures),
            tuple(self.searchpaths),
            tuple(self.commands),
            tuple(self.switched_off),
        )

    def fail(self, origin: Origin, stage: str, error: object, slot: str = "", name: str = "") -> None:
        text = error_line(error) if isinstance(error, BaseException) else str(error)
        self.failures.append(PluginFailure(origin, stage, text, slot, name))

    def load(self, entry: PluginEntry) -> None:
        try:
            module = entry.target.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # recorded with its origin; a plugin may fail in any way
            self.fail(entry.origin, "import", error)
            return
        if self._register(entry.origin, module):
            self._collect(entry.origin, module)

    def _register(self, origin: Origin, module: ModuleType) -> bool:
        name = f"{origin.dist}:{origin.entry}"
        try:
            self.manager.register(module, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            self.fail(origin, "hooks", str(error).splitlines()[-1])
            return False
        callers = self.manager.get_hookcallers(module) or []
        known = [*(slot.hook for slot in SLOTS.values()), "engine_config_searchpath", "engine_command"]
        unknown = [caller.name for caller in callers if not caller.has_spec()]
        if unknown:
            self.fail(origin, "hooks", f"no such hook: {', '.join(unknown)}; hooks are {', '.join(known)}")
        elif not callers:
            where = getattr(module, "__name__", quote(module))
            self.fail(origin, "hooks", f"{where} has no function marked with engine.hookspecs.hookimpl")
        if unknown or not callers:
            self.manager.unregister(name=name)
            return False
        return True

    def _collect(self, origin: Origin, module: ModuleType) -> None:
        for slot in SLOTS.values():
            for provider in self._call(origin, module, slot.hook):
                self._offer(origin, slot.name, provider)
        for path in self._call(origin, module, "engine_config_searchpath"):
            if isinstance(path, str) and path.startswith(("pkg://", "file://")):
                self.searchpaths.append(SearchPath(path, origin))
            else:
                self.fail(
                    origin, "call", f"engine_config_searchpath gave {quote(path)}: expected 'pkg://...' or 'file://...'"
                )

        for command in self._call(origin, module, "engine_command"):
            offer = CommandOffer(command, origin)
            wrong = command_error(command)
            if not wrong and any(offer.qualified == other.qualified for other in self.commands):
                wrong = f"offers the command {command.name!r} twice"
            if wrong:
                self.fail(origin, "provider", wrong)
            else:
                self.commands.append(offer)

    def _call(self, origin: Origin, module: ModuleType, hook: str) -> Sequence[Any]:
        """One plugin's answer to one hook; others' exceptions cannot lose it."""
        caller = getattr(self.manager.hook, hook)
        answers: list[Any] = []
        for impl in caller.get_hookimpls():
            if impl.plugin is not module:
                continue
            try:
                answer = impl.function()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # recorded with its origin
                self.fail(origin, "call", f"{hook}() raised {error_line(error)}")
                continue
            if isinstance(answer, list | tuple):
                answers.extend(answer)
            else:
                self.fail(origin, "call", f"{hook}() returned {type(answer).__name__}, expected a list")
        return answers

    def _offer(self, origin: Origin, slot: str, provider: object) -> None:
        if not isinstance(provider, Provider):
            self.fail(origin, "provider", f"expected a Provider, got {quote(provider)}", slot)
            return
        offer = Offer(slot, provider, origin)
        try:
            wrong = provider_error(slot, provider)
        except Exception as error:  # a record may hold anything
            wrong = f"its record cannot be read: {error_line(error)}"
        if not wrong and any(slot == other.slot and offer.qualified == other.qualified for other in self.offers):
            wrong = f"offers {slot}={offer.name} twice"
        if wrong:
            self.fail(origin, "provider", wrong, slot, str(provider.name))
        else:
            self.offers.append(offer)
