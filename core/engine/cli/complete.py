"""``engine complete -- LINE``: candidates for the last word of a command line, one per line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

from engine.assembly.discovery import Discovered, discover
from engine.cli.command import options, parser_of, positionals
from engine.cli.commands import after_others, commands, load, split
from engine.cli.plugins.named import short_words
from engine.contracts.command import OK, Command
from engine.contracts.config import Settings
from engine.contracts.slots import SLOTS


def candidates(line: str) -> list[str]:
    """What the last word of ``line`` (which starts with ``engine``) could become."""
    words = line.split(" ")[1:] or [""]
    word = words[-1]
    discovered = discover()
    known = commands(discovered)
    if len(words) == 1:
        return _matching(word, known)
    name, after = split(words)
    if not after:  # the second word of a name is not ended yet
        return [word]
    offer = known.get(name) or after_others().get(name)
    if offer is None:
        return []
    try:
        command = load(offer)
        parser = parser_of(name, command)
    except Exception:  # of a plugin's command; calling it tells
        return []
    if word.startswith("-"):
        return _matching(word, options(parser))
    second = [two.removeprefix(f"{name} ") for two in after_others() if two.startswith(f"{name} ") and len(words) == 2]
    wanted = positionals(parser)[sum(not typed.startswith("-") for typed in after[:-1]) :]
    if wanted:
        return _positional(wanted[0], word, discovered)
    return _matching(word, second) + (_overrides(word, discovered) if command.takes_overrides else [])


def _positional(wanted: argparse.Action, word: str, discovered: Discovered) -> list[str]:
    """What a command wants without a flag."""
    choices = {"SLOT": SLOTS, "PLUGIN": short_words(discovered)}.get(str(wanted.metavar), wanted.choices or ())
    return _matching(word, choices)


def _overrides(word: str, discovered: Discovered) -> list[str]:
    from engine.assembly.compose import PRESET
    from engine.assembly.compose import options as choices

    plus = "+" if word.startswith("+") else ""
    bare = word.removeprefix("+")
    if "=" in bare:
        group, _, typed = bare.partition("=")
        return [f"{plus}{group}={name}" for name in _matching(typed, choices(discovered).get(group, ()))]
    groups = [f"{plus}{group}=" for group in (PRESET, *SLOTS)]
    keys = [f"{key}" for key in _setting_keys(Settings(), "")] if not plus else []
    slot = bare.partition(".")[0]
    if slot in SLOTS and not SLOTS[slot].many:
        offers = discovered.of_slot(slot)
        fields = {field.name for offer in offers for field in dataclasses.fields(offer.config_class)}
        keys += [f"{slot}.{name}=" for name in sorted(fields)]
    return _matching(word, [*groups, *keys])


def _setting_keys(settings: object, prefix: str) -> Iterable[str]:
    assert dataclasses.is_dataclass(settings)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _setting_keys(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}="


def _matching(word: str, choices: Iterable[str]) -> list[str]:
    return [choice for choice in choices if choice.startswith(word)]


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("line", nargs="+")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    for candidate in candidates(" ".join(flags.line)):
        print(candidate)
    return OK


COMMAND = Command("Candidates for a command line.", _run, _flags, takes_overrides=False)
