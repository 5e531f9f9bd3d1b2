"""What a gateway does with its names for several models beside choosing one: cascades and shadows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from engine.contracts.config import GatewaySettings
from engine.http.gateway.cascade import Cascade
from engine.http.gateway.shadow import Shadows


@dataclass(frozen=True, slots=True)
class Tiers:
    """By name; of names without, nothing."""

    cascades: Mapping[str, Cascade]
    shadows: Mapping[str, Shadows]

    @staticmethod
    def of(settings: GatewaySettings) -> Tiers:
        """Raises :class:`AssemblyError` where the table of a cascade cannot be used."""
        models, shadows = settings.models, settings.shadow
        return Tiers(
            {name: Cascade(name, one, models[name]) for name, one in settings.cascade.items()},
            {name: Shadows(name, one, models[name]) for name, one in shadows.items() if one.share},
        )

    async def close(self) -> None:
        for one in self.shadows.values():
            await one.close()


TIERS: web.AppKey[Tiers] = web.AppKey("tiers", Tiers)
