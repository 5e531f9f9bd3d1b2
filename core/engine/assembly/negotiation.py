"""Does the selected set fit together, and with this model and device? Pure and total: all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import __version__
from engine.assembly import values
from engine.assembly.compose.selection import AUTO, Composed, Selection
from engine.assembly.compose.text import failure_notes
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.assembly.execution import CAPTURABLE, choose_execution, reasons_against
from engine.assembly.model_facts import BUNDLED
from engine.assembly.plan import PLAN_VERSION, EnginePlan, SlotChoice
from engine.assembly.records import reasons_of, told
from engine.contracts import MULTI_SLOTS, SLOTS
from engine.contracts.config import Settings, SlotConfig
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.contracts.model import DeviceFacts, ModelFacts

HOST_DRAFTER = "host_drafter"
"""Capability of drafters that read tokens on the CPU."""

PARALLEL_SIZES = ("tp", "pp", "ep", "sp")
"""Sizes of the ``parallelism`` config, and the capabilities a plugin must provide for more than one rank."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    slot: str
    pick: Selection
    offer: Offer
    config: dict[str, Any]
    passed_over: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.slot}={self.offer.name}"


def resolve(composed: Composed, discovered: Discovered, model: ModelFacts, device: DeviceFacts) -> EnginePlan:
    """The plan, or :class:`AssemblyError` with every reason why there is none."""
    problems: list[str] = []
    chosen = _choose(composed, discovered, model, device, problems)
    problems += _capability_problems(chosen, discovered)
    problems += _parallel_problems(chosen, discovered)
    settings = composed.settings
    problems += _setting_problems(settings, model)
    problems += _pool_problems(chosen, settings)
    problems += _execution_problems(chosen, settings, model, device)
    if problems:
        raise AssemblyError(problems)
    dtype = _dtype(settings, model, device)
    execution, execution_notes = choose_execution(settings.execution, device, dtype, *_attention(chosen))
    return EnginePlan(
        version=PLAN_VERSION,
        engine_version=__version__,
        model=model,
        device=device,
        dtype=dtype,
        max_len=settings.model.max_len or model.max_position,
        execution=execution,
        overlap=settings.overlap,
        settings=settings,
        slots={slot: tuple(_slot_choice(one) for one in chosen if one.slot == slot) for slot in SLOTS},
        notes=(*_notes(chosen, settings), *execution_notes),
    )


def plugin_problems(composed: Composed, discovered: Discovered) -> list[str]:
    """Problems that show without a model or a device: names nobody offers, or several."""
    problems: list[str] = []
    for slot, picks in composed.selections.items():
        for pick in picks:
            if pick.plugin != AUTO:
                _offer_named(slot, pick.plugin, discovered, problems)
    return problems


def _choose(
    composed: Composed, discovered: Discovered, model: ModelFacts, device: DeviceFacts, problems: list[str]
) -> list[_Chosen]:
    chosen = []
    for slot in SLOTS:
        picks = composed.selections.get(slot, ())
        if slot not in MULTI_SLOTS and len(picks) != 1:
            problems.append(f"{slot}: exactly one plugin is needed, {len(picks)} selected")
        for pick in picks:
            if pick.plugin == AUTO:
                one = _choose_auto(slot, pick, discovered, model, device, problems)
            else:
                one = _choose_named(slot, pick, discovered, model, device, problems)
            if one is not None:
                chosen.append(one)
    return chosen


def _choose_named(
    slot: str,
    pick: Selection,
    discovered: Discovered,
    model: ModelFacts,
    device: DeviceFacts,
    problems: list[str],
) -> _Chosen | None:
    offer = _offer_named(slot, pick.plugin, discovered, problems)
    if offer is None:
        return None
    reasons = _reasons(offer, model, device)
    others = [o.name for o in discovered.of_slot(slot) if o is not offer and not _reasons(o, model, device)]
    can = f" ({slot} plugins that can: {listing(others)})" if others else ""
    problems += [f"{slot}={offer.name} cannot serve {model.name} on {device.kind}: {why}{can}" for why in reasons]
    if not reasons:
        problems += _config_reasons(offer, pick.config, model, device)
    return _Chosen(slot, pick, offer, dict(pick.config))


def _choose_auto(
    slot: str,
    pick: Selection,
    discovered: Discovered,
    model: ModelFacts,
    device: DeviceFacts,
    problems: list[str],
) -> _Chosen | None:
    """The first candidate with no reason against it."""
    passed_over = []
    for name in pick.candidates:
        offers = discovered.named(slot, name)
        if not offers:
            passed_over.append(f"{name}: not installed")
            continue
        if len(offers) > 1:
            passed_over.append(f"{name}: offered by {listing(offer.qualified for offer in offers)}")
            continue
        reasons = _reasons(offers[0], model, device)
        if not reasons:
            config = _config_for_auto(slot, offers[0], pick.config, problems)
            reasons = tuple(_config_reasons(offers[0], config, model, device))
            if not reasons:
                return _Chosen(slot, pick, offers[0], config, tuple(passed_over))
        passed_over += [f"{name}: {reason}" for reason in reasons]
    tried = "; ".join(passed_over) or "it has no candidates"
    problems.append(f"{slot}=auto: nothing fits {model.name} on {device.kind}: {tried}")
    return None


def _config_for_auto(slot: str, offer: Offer, explicit: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The chosen plugin's defaults with what was set for the slot on top."""
    try:
        built = values.build(offer.config_class, dict(explicit))
    except Exception as error:  # __post_init__ of a third party may raise anything; it is named
        text = str(error) if isinstance(error, ValueError) else f"its config raised {told(error)}"
        problems.append(f"{slot}=auto chose {offer.name} of {offer.origin}: {text}")
        return dict(explicit)
    plain: dict[str, Any] = values.to_plain(built)
    return plain


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


def _reasons(offer: Offer, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    """Why a plugin cannot serve this model on this device; one that does not say so properly cannot."""
    who = f"unsupported() of {offer.slot}={offer.name} ({offer.origin})"
    return _asked(partial(offer.provider.unsupported, model, device), who)


def _config_reasons(offer: Offer, config: Mapping[str, Any], model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    """Why a plugin's settings do not go with this model or device."""
    try:
        built: SlotConfig = values.build(offer.config_class, dict(config))
    except Exception:
        return ()  # reported where the configuration was composed
    who = f"unsupported() of the config of {offer.slot}={offer.name} ({offer.origin})"
    return _asked(partial(built.unsupported, model, device), who)


def _asked(unsupported: Callable[[], object], who: str) -> tuple[str, ...]:
    """The reasons that a third party's function gives, or what is wrong with it."""
    try:
        returned = unsupported()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may fail in any way; the reason names it
        return (f"{who} raised {told(error)}",)
    return reasons_of(returned, who)


def _capability_problems(chosen: list[_Chosen], discovered: Discovered) -> list[str]:
    problems = []
    provided = {slot: set[str]() for slot in SLOTS}
    for one in chosen:
        provided[one.slot] |= set(one.offer.provider.provides)
    present = {one.slot: one for one in chosen}
    for one in chosen:
        for slot, needs in one.offer.provider.requires.items():
            lacking = [need for need in needs if need not in provided[slot]]
            if not lacking or (slot not in present and slot not in MULTI_SLOTS):
                continue  # nothing chosen there: reported where it was chosen
            have = [o.name for o in discovered.of_slot(slot) if set(lacking) <= set(o.provider.provides)]
            other = present[slot].label if slot in present else f"{slot}=[]"
            problems.append(
                f"{one.label} needs {slot} with {listing(lacking)}, but {other} lacks that; "
                f"{slot} plugins that have it: {listing(have)}"
            )
    return problems


def _parallel_problems(chosen: list[_Chosen], discovered: Discovered) -> list[str]:
    problems = []
    for one in chosen:
        if one.slot != "parallelism":
            continue
        for size in PARALLEL_SIZES:
            if one.config.get(size, 1) > 1 and size not in one.offer.provider.provides:
                have = [o.name for o in discovered.of_slot(one.slot) if size in o.provider.provides]
                problems.append(
                    f"parallelism.{size}={one.config[size]}: {one.label} does not split work that way; "
                    f"parallelism plugins that do: {listing(have)}. Use parallelism.{size}=1"
                )
    return problems


def _setting_problems(settings: Settings, model: ModelFacts) -> list[str]:
    problems = []
    wanted = settings.model.max_len
    if wanted is not None and wanted > model.max_position:
        problems.append(
            f"model.max_len={wanted}: {model.name} has {model.max_position} positions; "
            f"use model.max_len={model.max_position} or less"
        )
    return problems


def _pool_problems(chosen: list[_Chosen], settings: Settings) -> list[str]:
    wanted = settings.memory.kv_tokens
    sizes = [one.config["block_size"] for one in chosen if one.slot == "kv_allocator"]
    if wanted is None or not sizes or wanted > sizes[0]:
        return []
    fewest = (FEWEST_BLOCKS - 1) * sizes[0]  # one more is padding
    return [
        f"memory.kv_tokens={wanted}: the smallest KV pool has {FEWEST_BLOCKS - 1} blocks of kv_allocator.block_size="
        f"{sizes[0]} tokens; use memory.kv_tokens={fewest}"
    ]


def _execution_problems(chosen: list[_Chosen], settings: Settings, model: ModelFacts, device: DeviceFacts) -> list[str]:
    if settings.execution == AUTO:
        return []
    reasons = reasons_against(settings.execution, device, _dtype(settings, model, device), *_attention(chosen))
    return [f"execution={settings.execution}: {reason}; use execution=auto" for reason in reasons]


def _attention(chosen: list[_Chosen]) -> tuple[str, bool]:
    """The attention kernel's name, and whether it can be captured."""
    for one in chosen:
        if one.slot == "attention_kernel":
            return one.offer.name, CAPTURABLE in one.offer.provider.provides
    return "none", False


def _dtype(settings: Settings, model: ModelFacts, device: DeviceFacts) -> str:
    """The checkpoint's dtype; float32 for the small bundled model on a CPU, where exactness costs little."""
    if settings.model.dtype != AUTO:
        return settings.model.dtype
    if settings.model.path == BUNDLED and device.kind == "cpu":
        return "float32"
    return model.dtype


def _slot_choice(one: _Chosen) -> SlotChoice:
    return SlotChoice(
        slot=one.slot,
        name=one.offer.name,
        factory=one.offer.provider.factory,
        config_class=values.class_path(one.offer.config_class),
        config=one.config,
        origin=str(one.offer.origin),
        requested=one.pick.requested,
        passed_over=one.passed_over,
    )


def _notes(chosen: list[_Chosen], settings: Settings) -> tuple[str, ...]:
    notes = [
        f"{one.label} runs on the host: a step with drafts waits for the tokens of the step before"
        for one in chosen
        if HOST_DRAFTER in one.offer.provider.provides and settings.overlap
    ]
    if settings.server.api_key is None and settings.server.host not in ("127.0.0.1", "::1", "localhost"):
        notes.append(f"server.host={settings.server.host} without server.api_key: anyone who reaches it may use it")
    return tuple(notes)
