"""Which subcommands there are: the core's own, and those that plugins offer."""

from __future__ import annotations

import importlib
from collections import Counter

from engine.assembly.discovery import Discovered, discover
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.cli.command import report_failures
from engine.contracts.command import Command, CommandProvider

CORE = (
    CommandProvider("serve", "engine.cli.serve:COMMAND", "start the OpenAI-compatible server"),
    CommandProvider("eval", "engine.cli.eval:COMMAND", "measure what a plan costs in quality and what fits in memory"),
    CommandProvider("check", "engine.cli.check:COMMAND", "resolve a configuration without starting anything"),
    CommandProvider("config", "engine.cli.config:COMMAND", "print the composed configuration"),
    CommandProvider("plugins", "engine.cli.plugins:COMMAND", "list the installed plugins"),
    CommandProvider("completion", "engine.cli.completion:COMMAND", "print a completion script for bash, zsh or fish"),
)
HIDDEN = (CommandProvider("complete", "engine.cli.complete:COMMAND", "candidates for the last word of a line"),)


def commands(discovered: Discovered) -> dict[str, CommandProvider]:
    """Every command by the name that calls it. ``dist:name`` calls a plugin's command whose name is the core's or
    another plugin's, too."""
    found = {provider.name: provider for provider in CORE}
    counts = Counter([*found, *(offer.provider.name for offer in discovered.commands)])
    for offer in discovered.commands:
        found[offer.provider.name if counts[offer.provider.name] == 1 else offer.qualified] = offer.provider
    return found


def find(name: str) -> CommandProvider:
    """The command that ``name`` calls; plugins are loaded only where it is none of the core's. Raises
    :class:`AssemblyError`."""
    own = {provider.name: provider for provider in (*CORE, *HIDDEN)}
    if name in own:
        return own[name]
    discovered = discover()
    known = commands(discovered)
    if name in known:
        return known[name]
    report_failures(discovered.failures)
    same = [qualified for qualified in known if qualified.endswith(f":{name}")]
    if same:
        raise AssemblyError([f"several plugins offer the command {name!r}: {listing(same)} (call one of them so)"])
    raise AssemblyError([f"no such command {name!r}{nearest(name, known) or f' (commands: {listing(known)})'}"])


def load(provider: CommandProvider) -> Command:
    """The command itself, imported only when it is called. Raises :class:`AssemblyError`."""
    module, _, attribute = provider.factory.partition(":")
    try:
        command = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise AssemblyError([f"command {provider.name} cannot be loaded: {type(error).__name__}: {error}"]) from error
    if not isinstance(command, Command):
        found = type(command).__name__
        raise AssemblyError([f"command {provider.name}: {provider.factory} is a {found}, expected a Command"])
    return command
