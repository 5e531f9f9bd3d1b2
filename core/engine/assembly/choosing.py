"""Which plugin does each slot get? The one that is named, or with ``auto`` the first with no reason against it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.assembly import values
from engine.assembly.compose.selection import Composed, Selection
from engine.assembly.compose.text import failure_notes, named_failures
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.errors import listing, nearest
from engine.assembly.records import AUTO, THIRD_PARTY, reasons_of
from engine.checkpoint.files import shown
from engine.contracts.config import SlotConfig
from engine.contracts.model import DeviceFacts, ModelConfig, ModelFacts
from engine.contracts.provider import always_supported
from engine.contracts.slots import SLOTS
from engine.plugin_guard.calls import error_line

ARCHITECTURE = "architecture"
_OTHERWISE = "; set model.path to a model that is computed, or install an architecture plugin for this one"


@dataclass(frozen=True, slots=True)
class Chosen:
    slot: str
    pick: Selection
    offer: Offer
    config: dict[str, Any]
    passed_over: tuple[str, ...] = ()
    fits_too: tuple[str, ...] = ()
    """With ``auto``: third parties' plugins that could have been chosen, as overrides that choose them."""

    @property
    def label(self) -> str:
        return f"{self.slot}={self.offer.name}"


@dataclass(frozen=True, slots=True)
class Need:
    """Of one chosen plugin for another one."""

    who: str
    slot: str
    capability: str


def needs_of(chosen: Chosen) -> list[Need]:
    """What a plugin needs of others: always, and with the values that its config has."""
    provider, label = chosen.offer.provider, chosen.label
    found = [Need(label, slot, name) for slot, names in provider.requires.items() for name in names]
    try:
        config: SlotConfig = values.build(chosen.offer.config_class, chosen.config)
    except Exception:
        return found  # reported where the configuration was composed
    return found + [Need(label, slot, name) for slot, names in config.requires().items() for name in names]


def choose(
    composed: Composed, discovered: Discovered, model: ModelFacts, device: DeviceFacts, problems: list[str]
) -> list[Chosen]:
    """One plugin for each selection but the architecture's, as far as there is one."""
    chosen: list[Chosen] = []
    for slot in SLOTS:
        if slot != ARCHITECTURE:
            needed = [need for one in chosen for need in needs_of(one) if need.slot == slot]
            chosen += _choose_for(slot, composed, discovered, model, device, problems, needed)
    return chosen


def choose_without_model(
    composed: Composed, discovered: Discovered, slots: Sequence[str], problems: list[str]
) -> list[Chosen]:
    """The plugins that are named for some slots, where no model and no device is to be served."""
    chosen: list[Chosen] = []
    for slot in slots:
        for pick in composed.selections.get(slot, ()):
            if (offer := _offer_named(slot, pick.plugin, discovered, problems)) is not None:
                chosen.append(Chosen(slot, pick, offer, dict(pick.config)))
    return chosen


def choose_architecture(
    composed: Composed, discovered: Discovered, model: ModelConfig, device: DeviceFacts, problems: list[str]
) -> Chosen | None:
    """The plugin that describes the model: everything else is chosen by what it describes."""
    return next(iter(_choose_for(ARCHITECTURE, composed, discovered, model, device, problems)), None)


def _choose_for(
    slot: str,
    composed: Composed,
    discovered: Discovered,
    model: ModelConfig,
    device: DeviceFacts,
    problems: list[str],
    needed: Sequence[Need] = (),
) -> Iterator[Chosen]:
    picks = composed.selections.get(slot, ())
    if not SLOTS[slot].many and len(picks) != 1:
        problems.append(f"{slot}: exactly one plugin is needed, {len(picks)} selected")
    for pick in picks:
        if pick.plugin == AUTO:
            one = _Auto(slot, pick, discovered, model, device, tuple(needed)).choose(problems)
        else:
            one = _choose_named(slot, pick, discovered, model, device, problems)
        if one is not None:
            yield one


def plugin_problems(composed: Composed, discovered: Discovered) -> list[str]:
    """Problems that show without a model or a device: names nobody offers, or several."""
    problems: list[str] = []
    for slot, picks in composed.selections.items():
        for pick in picks:
            if pick.plugin != AUTO:
                _offer_named(slot, pick.plugin, discovered, problems)
    return problems


def _choose_named(
    slot: str,
    pick: Selection,
    discovered: Discovered,
    model: ModelConfig,
    device: DeviceFacts,
    problems: list[str],
) -> Chosen | None:
    offer = _offer_named(slot, pick.plugin, discovered, problems)
    if offer is None:
        return None
    reasons = offer_reasons(offer, model, device)
    if reasons:
        can = others_that_can(offer, discovered, model, device) or _otherwise(slot)
        asked = f"{slot}={offer.name} cannot serve {_subject(slot, model)} on {device.kind}"
        problems += [f"{asked}: {why}{can}" for why in reasons]
    else:
        problems += _config_reasons(offer, pick.config, model, device)
    return Chosen(slot, pick, offer, dict(pick.config))


def others_that_can(offer: Offer, discovered: Discovered, model: ModelConfig, device: DeviceFacts) -> str:
    """In brackets, for a message: the other plugins of the slot that have no reason against this model and device."""
    others = [o.name for o in discovered.of_slot(offer.slot) if o is not offer and not offer_reasons(o, model, device)]
    return f" ({offer.slot} plugins that can: {listing(others)})" if others else ""


def _subject(slot: str, model: ModelConfig) -> str:
    """What a plugin is asked about: which model, and for architectures what it calls itself."""
    return f"{model.name} ({shown(model.architecture)})" if slot == ARCHITECTURE else model.name


def _otherwise(slot: str) -> str:
    """What to do where no plugin of the slot can, as far as the reasons do not say it."""
    return _OTHERWISE if slot == ARCHITECTURE else ""


def _offer_named(slot: str, name: str, discovered: Discovered, problems: list[str]) -> Offer | None:
    offers = discovered.named(slot, name)
    if len(offers) == 1:
        return offers[0]
    if offers:
        who = listing(offer.qualified for offer in offers)
        problems.append(
            f"{slot}={name} is offered by {len(offers)} distributions: {who}. Choose one with "
            f"{slot}.plugin={offers[0].qualified}, or drop one with plugins.disable=[{offers[0].origin.dist}]"
        )
        return None
    names = discovered.names(slot)
    problems.append(
        f"{slot}={name}: no installed plugin has that name{nearest(name, names)} (installed: {listing(names)})"
        f"{failure_notes(discovered, slot, name)}"
    )
    return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    label: str
    reasons: tuple[str, ...]
    """Why not; empty: it fits."""
    offer: Offer | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Auto:
    """The choice that ``auto`` makes for one slot."""

    slot: str
    pick: Selection
    discovered: Discovered
    model: ModelConfig
    device: DeviceFacts
    needed: tuple[Need, ...] = ()
    """By the plugins of the slots before this one."""

    def choose(self, problems: list[str]) -> Chosen | None:
        """The first candidate with no reason against it. Those after it are not asked."""
        passed_over: list[str] = []
        for name in self.pick.candidates:
            found = self._third_parties() if name == THIRD_PARTY else [self._named(name)]
            passed_over += [f"{one.label}: {reason}" for one in found for reason in one.reasons]
            fitting = [one for one in found if not one.reasons]
            if fitting:
                first, *others = fitting
                assert first.offer is not None
                fits_too = tuple(self._selecting(one.offer) for one in others if one.offer is not None)
                return Chosen(self.slot, self.pick, first.offer, first.config, tuple(passed_over), fits_too)
        tried = "; ".join(passed_over) or "it has no candidates"
        broken = failure_notes(self.discovered, self.slot) if THIRD_PARTY in self.pick.candidates else ""
        if self.slot == ARCHITECTURE and (unknown := self._unknown(passed_over)):
            problems.append(f"{self.slot}=auto: {unknown}{_OTHERWISE}. Asked were {tried}{broken}")
            return None
        asked = f"{self.slot}=auto: nothing fits {_subject(self.slot, self.model)} on {self.device.kind}"
        problems.append(f"{asked}: {tried}{_otherwise(self.slot)}{broken}")
        return None

    def _unknown(self, reasons: Sequence[str]) -> str:
        """Where no plugin names the model's architecture among what it computes: that, and near names. Empty where one
        does."""
        split = (reason.partition(": ") for reason in reasons)
        who = {word: label for label, _, why in split for word in re.findall(r"\w+", why)}
        if self.model.architecture in who:
            return ""
        near = difflib.get_close_matches(self.model.architecture, sorted(who), n=3)
        names = f"; near names: {', '.join(f'{name} ({who[name]})' for name in near)}" if near else ""
        return f"no plugin computes {shown(self.model.architecture)}, the architecture of {self.model.name}{names}"

    def _named(self, name: str) -> _Candidate:
        offers = self._meant(name)
        if len(offers) == 1:
            return self._ask(offers[0], name)
        if offers:
            return _Candidate(name, (f"offered by {listing(offer.qualified for offer in offers)}; name one of these",))
        failed = tuple(str(failure) for failure in named_failures(self.discovered, self.slot, name))
        known = [*self.discovered.names(self.slot), THIRD_PARTY]
        return _Candidate(name, failed or (f"not installed{nearest(name.rpartition(':')[2], known)}",))

    def _meant(self, name: str) -> tuple[Offer, ...]:
        """A built-in plugin's name means that plugin, whoever else has it: what others install changes no default."""
        offers = self.discovered.named(self.slot, name)
        return tuple(offer for offer in offers if not offer.is_third_party) or offers

    def _third_parties(self) -> list[_Candidate]:
        """Those that are not among the candidates by name, by distribution and name."""
        named = [offer for name in self.pick.candidates for offer in self._meant(name)]
        others = [o for o in self.discovered.of_slot(self.slot) if o.is_third_party and o not in named]
        return [self._third_party(offer) for offer in sorted(others, key=lambda o: (o.origin.dist.lower(), o.name))]

    def _third_party(self, offer: Offer) -> _Candidate:
        if offer.provider.unsupported is always_supported:
            why = f"it does not say what it supports (no unsupported()); {self._selecting(offer)} selects it"
            return _Candidate(offer.qualified, (why,))
        return self._ask(offer, offer.qualified)

    def _ask(self, offer: Offer, label: str) -> _Candidate:
        """What speaks against a plugin with its defaults and, on top, what was set for the slot."""
        lacking = [need for need in self.needed if need.capability not in offer.provider.provides]
        reasons = offer_reasons(offer, self.model, self.device)
        reasons += tuple(f"lacks {need.capability}, which {need.who} needs" for need in lacking)
        if reasons:
            return _Candidate(label, reasons)
        try:
            config = values.to_plain(values.build(offer.config_class, dict(self.pick.config)))
        except Exception as error:  # __post_init__ of a third party may raise anything; it is named
            text = str(error) if isinstance(error, ValueError) else f"its config raised {error_line(error)}"
            return _Candidate(label, (text,))
        return _Candidate(label, _config_reasons(offer, config, self.model, self.device), offer, config)

    def _selecting(self, offer: Offer) -> str:
        """The override that selects this plugin."""
        if len(self.discovered.named(self.slot, offer.name)) == 1:
            return f"{self.slot}={offer.name}"
        return f"{self.slot}.plugin={offer.qualified}"


def offer_reasons(offer: Offer, model: ModelConfig, device: DeviceFacts) -> tuple[str, ...]:
    """Why a plugin cannot serve this model on this device; one that does not say so properly cannot."""
    who = f"unsupported() of {offer.slot}={offer.name} ({offer.origin})"
    # An architecture is asked before there are facts.
    unsupported: Callable[[Any, DeviceFacts], object] = offer.provider.unsupported
    return _asked(partial(unsupported, model, device), who)


def _config_reasons(
    offer: Offer, config: Mapping[str, Any], model: ModelConfig, device: DeviceFacts
) -> tuple[str, ...]:
    """Why a plugin's settings do not go with this model or device."""
    try:
        built: SlotConfig = values.build(offer.config_class, dict(config))
    except Exception:
        return ()  # reported where the configuration was composed
    who = f"unsupported() of the config of {offer.slot}={offer.name} ({offer.origin})"
    unsupported: Callable[[Any, DeviceFacts], object] = built.unsupported
    return _asked(partial(unsupported, model, device), who)


def _asked(unsupported: Callable[[], object], who: str) -> tuple[str, ...]:
    """The reasons that a third party's function gives, or what is wrong with it."""
    try:
        returned = unsupported()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may fail in any way; the reason names it
        return (f"{who} raised {error_line(error)}",)
    return reasons_of(returned, who)
