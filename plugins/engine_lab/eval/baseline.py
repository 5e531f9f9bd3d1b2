"""The plugins that others are compared with, found by what they offer and not by name."""

from __future__ import annotations

from collections.abc import Iterable

from engine.assembly.discovery import OWN_DISTRIBUTION, Discovered, Offer
from engine_lab.shared.errors import EvalError

LOSSLESS, DRAFTS = "lossless", "drafts"
"""Capabilities."""


def lossless_override(slot: str, discovered: Discovered) -> str:
    """``slot=NAME`` of a plugin that keeps every bit. Raises :class:`EvalError` where there is none."""
    offers = (offer for offer in discovered.of_slot(slot) if LOSSLESS in offer.provider.provides)
    return _override(slot, offers, f"that provides {LOSSLESS!r}")


def undrafted_override(discovered: Discovered) -> str:
    """``drafter=NAME`` of a plugin that never drafts. Raises :class:`EvalError` where there is none."""
    silent = (offer for offer in discovered.of_slot("drafter") if DRAFTS not in offer.provider.provides)
    # One that drafts, and does not say so, has a ``max_width`` above 0.
    offers = (offer for offer in silent if getattr(offer.config_class, "max_width", None) == 0)
    return _override("drafter", offers, f"with max_width 0 that does not provide {DRAFTS!r}")


def _override(slot: str, offers: Iterable[Offer], wanted: str) -> str:
    found = sorted(offers, key=lambda offer: (offer.origin.dist != OWN_DISTRIBUTION, offer.qualified))
    if not found:
        raise EvalError(f"no {slot} {wanted} is installed to compare with; 'engine plugins' lists them")
    return f"{slot}={found[0].name}"
