"""What a built-in plugin's metadata claims is what its class does: one is read to plan, the other to run."""

from __future__ import annotations

import pytest

from engine.assembly import values
from engine.assembly.discovery import Offer, discover
from engine.contracts.config import PluginSettings
from engine.contracts.slots import SLOTS

OFFERS = discover(PluginSettings(third_party=False)).offers
CLAIMS = {
    ("communicator", "capturable"): lambda cls: cls.capturable,
    ("drafter", "host_drafter"): lambda cls: cls.placement == "host",
    ("drafter", "drafts"): lambda cls: getattr(cls, "max_width", None) != 0,
    ("kv_allocator", "prefix_cache"): lambda cls: cls.caches_prefixes,
    ("kv_format", "lossless"): lambda cls: cls.lossless,
}
"""Capabilities that a class attribute states as well."""


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.slot}={offer.name}")
def test_capabilities_agree_with_the_class(offer: Offer) -> None:
    plugin = values.load(offer.provider.factory)
    for (slot, capability), has in CLAIMS.items():
        if slot == offer.slot:
            assert has(plugin) == (capability in offer.provider.provides), capability


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.slot}={offer.name}")
def test_the_factory_is_a_class_with_every_method_of_its_protocol(offer: Offer) -> None:
    plugin, protocol = values.load(offer.provider.factory), SLOTS[offer.slot].protocol
    methods = [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
    assert methods and [name for name in methods if not callable(getattr(plugin, name, None))] == []
