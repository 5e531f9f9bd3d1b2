"""Texts for error messages."""

from __future__ import annotations

from engine.assembly.discovery import Discovered, PluginFailure


def named_failures(discovered: Discovered, slot: str, name: str) -> list[PluginFailure]:
    """Failures of plugins that would have been ``slot=name``, had they not failed."""
    return [failure for failure in discovered.failures if (failure.slot, failure.name) == (slot, name)]


def failure_notes(discovered: Discovered, slot: str, name: str = "") -> str:
    """Plugins that failed or are switched off, and so may be why ``slot=name``, or anything, is not on offer."""
    failed = [failure for failure in discovered.failures if failure.slot in ("", slot)]
    named = (name and named_failures(discovered, slot, name)) or failed
    off = [f"{origin} is switched off (plugins.third_party, allow or disable)" for origin in discovered.switched_off]
    return "".join(f"\n      note: {reason}" for reason in (*named, *off))


def first_line(error: BaseException) -> str:
    """Without what Hydra and OmegaConf say below it (file names, the full key again)."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def first_lines(error: BaseException) -> str:
    """The first six on one line: for errors whose first line alone names neither file nor key."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6]) or type(error).__name__
