"""Engines of a fleet: who starts them, and do they fit on the machines that they run on?"""

from __future__ import annotations

from dataclasses import fields

from engine.assembly import values
from engine.assembly.choosing import Chosen, offer_reasons
from engine.assembly.compose.selection import Selection
from engine.assembly.discovery import Discovered
from engine.assembly.errors import listing, nearest
from engine.contracts.config import ParallelismConfig, Settings
from engine.contracts.kv_store import SHARED, SHARED_HERE
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.parallelism import ENGINES, ENGINES_HERE
from engine.plugin_guard.calls import error_line

SLOT = "parallelism"
LAUNCH = "fleet.launch"


def choose_launcher(
    settings: Settings, discovered: Discovered, model: ModelFacts, device: DeviceFacts, problems: list[str]
) -> Chosen | None:
    """The plugin that ``fleet.launcher`` names; ``None``: engines are children of the server, or there are problems."""
    name, given = settings.fleet.launcher, settings.fleet.launch
    asked = f"fleet.launcher={name}"
    able = [o for o in discovered.of_slot(SLOT) if {ENGINES, ENGINES_HERE} & {*o.provider.provides}]
    offers = [offer for offer in discovered.named(SLOT, name) if offer in able]
    if len(offers) != 1:
        which = f"offered by {listing(o.qualified for o in offers)}" if offers else "no plugin of that name does"
        names = [offer.name for offer in able]
        problems.append(f"{asked}: {which}; those that start engines are {listing(names)}{nearest(name, names)}")
        return None
    (offer,) = offers
    if ENGINES not in offer.provider.provides:
        problems += [f"{LAUNCH}.{key}: {asked} has no settings; leave it out" for key in given]
        return None
    problems += [f"{asked}: {why}" for why in offer_reasons(offer, model, device)]
    own = {one.name for one in fields(offer.config_class)} - {one.name for one in fields(ParallelismConfig)}
    unknown = [key for key in given if key not in own]
    problems += [
        f"{LAUNCH}.{key}: {asked} has no such setting{nearest(key, own)} (it has {listing(sorted(own))})"
        for key in unknown
    ]
    if unknown:
        return None
    try:
        config = values.to_plain(values.build(offer.config_class, dict(given)))
    except Exception as error:  # __post_init__ of a third party may raise anything
        problems.append(in_fleet(str(error) if isinstance(error, ValueError) else f"{asked}: {error_line(error)}"))
        return None
    return Chosen(SLOT, Selection(name, name, config), offer, config)


def in_fleet(text: str) -> str:
    """What a launcher says of its settings, with the names that they have in the fleet."""
    return text.replace(f"{SLOT}.", f"{LAUNCH}.").replace(f"{SLOT}=", "fleet.launcher=")


def fleet_problems(chosen: list[Chosen], settings: Settings, device: DeviceFacts, elsewhere: bool) -> list[str]:
    """Of the engines: each is on one machine. Where the server starts them, all are on this one, and on GPUs of their
    own. ``elsewhere``: a launcher starts them."""
    if settings.gateway.targets:
        return ["gateway.targets: servers elsewhere are for engine gateway; leave it out"]
    replicas, prefill = settings.fleet.replicas, settings.fleet.prefill
    (config,) = (one.config for one in chosen if one.slot == SLOT)
    each, nodes = int(config["tp"]) * int(config["pp"]) * int(config["pcp"]), int(config["nodes"])
    stores = [one for one in chosen if one.slot == "kv_store"]
    shared = {SHARED} if elsewhere or nodes > 1 else {SHARED, SHARED_HERE}
    if prefill and not any(shared.intersection(one.offer.provider.provides) for one in stores):
        names = [one.offer.name for one in stores]
        return [
            f"fleet.prefill={prefill}: engines that decode need a store in which they find what others have computed, "
            f"and kv_store=[{','.join(names)}] has none; add one that provides {' or '.join(sorted(shared))}"
        ]
    if elsewhere:
        why = f"fleet.launcher={settings.fleet.launcher}: an engine is on one machine, and parallelism.nodes={nodes}"
        return [f"{why}; use parallelism.nodes=1"] if nodes > 1 else []
    if replicas == 1:
        return []
    if nodes > 1:
        return [f"fleet.replicas={replicas}: engines side by side are on one machine, and parallelism.nodes={nodes}"]
    if device.kind != "cuda" or replicas * each <= device.count or config["share_devices"]:
        return []
    return [
        f"fleet.replicas={replicas}: engines of {each} GPU{'s' * (each > 1)} each need {replicas * each}, and "
        f"{device.count} can be seen (CUDA_VISIBLE_DEVICES?); at most fleet.replicas={device.count // each} fit"
    ]
