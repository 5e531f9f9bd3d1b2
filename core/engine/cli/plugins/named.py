"""Which plugin a word of the command line means: ``NAME``, ``SLOT=NAME``, ``DIST:NAME`` or ``SLOT=DIST:NAME``."""

from __future__ import annotations

from engine.assembly.compose.text import failure_notes
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.contracts.slots import SLOTS

HELP = "its NAME, or SLOT=NAME where several slots have one of that name; DIST:NAME where several packages do"


def find_offer(word: str, discovered: Discovered) -> Offer:
    """The one plugin that is meant. Raises :class:`AssemblyError`."""
    slot, _, name = word.rpartition("=")
    if slot:
        check_slot(slot)
    slots = (slot,) if slot else SLOTS
    found = [offer for each in slots for offer in discovered.named(each, name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise AssemblyError([f"{word}: there are {len(found)} such plugins; say which of {listing(_ways(found))}"])
    if word in SLOTS:
        raise AssemblyError([f"{word} is a slot; its plugins are {listing(map(shown, discovered.of_slot(word)))}"])
    names = [offer.name for each in slots for offer in discovered.of_slot(each)]
    where = f" (installed: {listing(names)})" if slot else " ('engine plugins' lists them)"
    why = failure_notes(discovered, slot, name)
    raise AssemblyError([f"{word}: no installed plugin has that name{nearest(name, names)}{where}{why}"])


def check_slot(slot: str) -> None:
    """Raises :class:`AssemblyError` unless there is such a slot."""
    if slot not in SLOTS:
        raise AssemblyError([f"no such slot {slot!r}{nearest(slot, SLOTS)} (slots: {listing(SLOTS)})"])


def shown(offer: Offer) -> str:
    """``slot=name``, as error messages and reports name a plugin."""
    return f"{offer.slot}={offer.name}"


def selecting(offer: Offer, discovered: Discovered) -> list[str]:
    """The overrides that select it."""
    alone = len(discovered.named(offer.slot, offer.name)) == 1
    if SLOTS[offer.slot].many:
        further = [] if alone else [f"{offer.slot}.{offer.name}.plugin={offer.qualified}"]
        return [f"{offer.slot}=[{offer.name}]", *further]
    return [f"{offer.slot}={offer.name}"] if alone else [f"{offer.slot}.plugin={offer.qualified}"]


def short_words(discovered: Discovered) -> tuple[str, ...]:
    """A word for each plugin, the shortest that means it alone."""
    names = [offer.name for offer in discovered.offers]
    ways = _ways(list(discovered.offers))
    return tuple(name if names.count(name) == 1 else way for name, way in zip(names, ways))


def _ways(offers: list[Offer]) -> list[str]:
    """The shortest words that tell these plugins apart."""
    names = [shown(offer) for offer in offers]
    return [name if names.count(name) == 1 else f"{o.slot}={o.qualified}" for name, o in zip(names, offers)]
