"""What the routes of a gateway share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from engine.contracts.config import GatewaySettings
from engine.contracts.router import ApiRequest, Attempts, Router
from engine.http.state import ListenerState
from engine.service.errors import ApiError
from engine.service.placing import Placing
from engine.service.targets import Target, Targets, taking

MOST_LISTED = 50
"""Models in an error message."""


@dataclass(slots=True, eq=False, kw_only=True)
class GatewayState(ListenerState):
    gateway: GatewaySettings
    targets: Targets
    make_router: Callable[[], Router]
    key: str | None
    """The API key of the targets."""
    placing: dict[str, Placing] = field(default_factory=dict)
    """By model: each has a router of its own, for which the targets with this model are the fleet."""

    def serving(self, model: str | None) -> tuple[str, list[Target]]:
        """The model's name, and the targets that have it. Raises :class:`ApiError`: ``unavailable`` while that cannot
        be known, ``not_found``."""
        name, found = self.targets.serving(model)
        if found:
            return name, found
        if unknown := [target.id for target in self.targets.values() if not target.models]:
            message = f"No target has this model, and nothing is known of: {', '.join(unknown)}."
            raise ApiError("unavailable", message, code="not_ready", retry_after_s=2)
        names = [*self.targets.models]
        known = ", ".join([*map(repr, names[:MOST_LISTED]), *["..."] * (len(names) > MOST_LISTED)])
        message = f"The model {name[:128]!r} does not exist here; there are: {known}."
        raise ApiError("not_found", message, param="model", code="model_not_found")

    def place(self, api: ApiRequest, targets: list[Target]) -> Attempts:
        """Raises :class:`ApiError`."""
        if (placing := self.placing.get(api.model)) is None:
            placing = self.placing[api.model] = Placing(self.make_router())
        able = taking(targets)
        route = placing.place(api, [target.view(api.model, alive=target in able) for target in targets])
        if isinstance(route, Attempts):
            return route
        message = "The router sent this request where a gateway does not pass it on."
        raise ApiError("failed", message, code="router_failed")

    def not_ready(self) -> str | None:
        """Why no request is taken now; ``None``: each model has a target that takes them."""
        if self.admission.leaving:
            return "draining"
        if not (models := self.targets.models):
            return ", ".join(f"{target.id}: {target.why_not}" for target in self.targets.values())
        lost = [name for name in models if not taking(self.targets.serving(name)[1])]
        return f"no target takes requests for {', '.join(lost)}" if lost else None


GATEWAY: web.AppKey[GatewayState] = web.AppKey("gateway", GatewayState)


def gateway_of(http: web.Request) -> GatewayState:
    return http.app[GATEWAY]
