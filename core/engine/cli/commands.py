"""Which subcommands there are: the core's own, and those that plugins offer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.assembly import values
from engine.assembly.discovery import OWN_DISTRIBUTION, CommandOffer, Discovered, Origin, discover
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.cli.command import report_failures
from engine.contracts.command import Command, CommandProvider
from engine.contracts.config import PluginSettings
from engine.plugin_guard.calls import error_line

CORE = (
    CommandProvider("serve", "engine.cli.serve:COMMAND", "start the OpenAI-compatible server"),
    CommandProvider("gateway", "engine.cli.gateway:COMMAND", "place requests among servers elsewhere"),
    CommandProvider("batch", "engine.cli.batch:COMMAND", "answer a file of requests without a server"),
    CommandProvider("worker", "engine.cli.worker:COMMAND", "be a further rank of an engine that waits for workers"),
    CommandProvider("check", "engine.cli.check:COMMAND", "resolve a configuration without starting anything"),
    CommandProvider("config", "engine.cli.config:COMMAND", "print the composed configuration"),
    CommandProvider("plugins", "engine.cli.plugins.listed:COMMAND", "list, write, check and show plugins"),
    CommandProvider("completion", "engine.cli.completion:COMMAND", "print a completion script for bash, zsh or fish"),
)
TWO_WORDS = (
    CommandProvider("plugins new", "engine.cli.plugins.new:COMMAND", "write a package with a plugin for a slot"),
    CommandProvider("plugins check", "engine.cli.plugins.check:COMMAND", "run the suite of its slot on a plugin"),
    CommandProvider("plugins show", "engine.cli.plugins.show:COMMAND", "what a plugin is, needs and can be told"),
)
"""Commands after another one: its help lists them."""
HIDDEN = (CommandProvider("complete", "engine.cli.complete:COMMAND", "candidates for the last word of a line"),)
TAKEN = frozenset({"help", *(provider.name for provider in (*CORE, *HIDDEN))})
OWN = (*CORE, *TWO_WORDS, *HIDDEN)
_OWN = Origin(OWN_DISTRIBUTION, "", "")


def commands(discovered: Discovered) -> dict[str, CommandOffer]:
    """Every command by the shortest name that calls it: the core's, then plugins'. Where two packages offer one name
    it is the built-in one's, and others are ``dist:name``."""
    found = {provider.name: CommandOffer(provider, _OWN) for provider in CORE}
    own = {offer.name for offer in discovered.commands if offer.origin.dist == OWN_DISTRIBUTION}
    counts = Counter(offer.name for offer in discovered.commands)
    for offer in discovered.commands:
        alone = counts[offer.name] == 1 or (offer.name in own and offer.origin.dist == OWN_DISTRIBUTION)
        found[offer.name if alone and offer.name not in TAKEN else offer.qualified] = offer
    return found


def after_others() -> dict[str, CommandOffer]:
    """The commands of two words, by these."""
    return {provider.name: CommandOffer(provider, _OWN) for provider in TWO_WORDS}


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name, which has one word or two, and what is after it. There is at least one word."""
    two = " ".join(words[:2])
    length = 2 if any(two == provider.name for provider in TWO_WORDS) else 1
    return " ".join(words[:length]), list(words[length:])


def find(name: str) -> CommandOffer:
    """The command that ``name``, or ``dist:name``, calls. Other packages are loaded only where the engine itself has
    none of that name. Raises :class:`AssemblyError`."""
    for provider in OWN:
        if name == provider.name:
            return CommandOffer(provider, _OWN)
    for settings in (PluginSettings(third_party=False), PluginSettings()):
        discovered = discover(settings)
        known = commands(discovered)
        offer = known.get(name) or next((o for o in discovered.commands if o.qualified == name), None)
        if offer is not None:
            return offer
    report_failures(discovered.failures)
    same = [offer.qualified for offer in discovered.commands if offer.name == name]
    if same:
        raise AssemblyError([f"several packages offer the command {name!r}: say which of {listing(same)}"])
    raise AssemblyError([f"no such command {name!r}{nearest(name, known) or f' (commands: {listing(known)})'}"])


def load(offer: CommandOffer) -> Command:
    """The command itself, imported only when it is called. Raises :class:`AssemblyError` where a plugin's fails."""
    target = offer.provider.command
    if offer.origin is _OWN:
        command = values.load(target)
    else:
        try:
            command = values.load(target)
        except Exception as error:  # importing a plugin may fail in any way
            why = error_line(error)
            raise AssemblyError([f"command {offer.qualified} cannot be imported from {target}: {why}"]) from error
    if not isinstance(command, Command):
        raise AssemblyError([f"command {offer.qualified}: {target} is a {type(command).__name__}, expected a Command"])
    return command
