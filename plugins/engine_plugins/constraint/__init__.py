"""Which tokens may come next."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.constraint.llguidance import LLGuidanceConfig


@hookimpl
def engine_constraint() -> list[Provider]:
    return [
        Provider(
            "llguidance",
            "engine_plugins.constraint.llguidance:LLGuidance",
            config=LLGuidanceConfig,
            doc="JSON schemas, regular expressions and grammars, by the library llguidance.",
        )
    ]
