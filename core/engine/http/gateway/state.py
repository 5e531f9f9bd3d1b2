"""What the routes of a gateway share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from engine.contracts.config import GatewaySettings
from engine.contracts.router import ApiRequest, Attempts, ModelRequest, ModelView, Router
from engine.http.state import ListenerState
from engine.service.errors import ApiError
from engine.service.peek import Peek
from engine.service.placing import Placing
from engine.service.targets import Target, Targets, taking

MOST_LISTED = 50
"""Models in an error message."""
MOST_REASON = 128
"""Characters of why a router chose."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The models that a request's name stands for."""

    name: str
    """As the client said it, and as it is known here."""
    models: Mapping[str, list[Target]]
    """In the order in which they are tried, each with the targets that have it."""
    reason: str = ""
    """Why the first one, in a few words; empty where nobody chose."""

    @property
    def first(self) -> str:
        return next(iter(self.models))


@dataclass(slots=True, eq=False, kw_only=True)
class GatewayState(ListenerState):
    gateway: GatewaySettings
    targets: Targets
    make_router: Callable[[], Router]
    choosing: Placing
    """Of models, where a name stands for several."""
    placing: dict[str, Placing] = field(default_factory=dict)
    """By model: each has a router of its own, for which the own targets with this model are the fleet."""

    def serving(self, request_id: str, kind: str, peeked: Peek) -> Chosen:
        """The models that the name of a request's model stands for. Raises :class:`ApiError`: ``unavailable`` while
        that cannot be known, ``not_found``, and as the router."""
        name, models = self.targets.serving(peeked.model)
        having = {model: [one for one in self.targets.having(model) if one.answers(kind)] for model in models}
        found = {model: targets for model, targets in having.items() if targets}
        if len(found) > 1 and name not in models:  # who names a model itself has chosen
            views = [_view(model, targets) for model, targets in found.items()]
            request = ModelRequest(request_id, kind, name, peeked.prompt_fields, peeked.fields)
            choice = self.choosing.choose(request, views)
            return Chosen(name, {model: found[model] for model in choice.models}, _line(choice.reason))
        if found:
            return Chosen(name, found)
        if models:
            message = f"The targets of {name[:128]!r} have no such endpoint; they have those of chats and completions."
            raise ApiError("not_found", message, code="no_such_endpoint")
        if unknown := [target.id for target in self.targets.values() if not target.models]:
            message = f"No target has this model, and nothing is known of: {', '.join(unknown)}."
            raise ApiError("unavailable", message, code="not_ready", retry_after_s=2)
        if name in self.gateway.models:
            message = f"No target has a model that {name[:128]!r} stands for: {_listed(self.gateway.models[name])}"
        else:
            message = f"The model {name[:128]!r} does not exist here"
        message += f"; there are: {_listed([known for known in self.targets.models if known != name])}."
        raise ApiError("not_found", message, param="model", code="model_not_found")

    def place(self, api: ApiRequest, targets: list[Target]) -> Attempts:
        """See :class:`engine.service.attempts.Places`."""
        able = taking(targets)
        views = [target.view(api.model, alive=target in able) for target in targets]
        route = self._placing_of(api.model).place(api, views)
        if isinstance(route, Attempts):
            return route
        message = "The router sent this request where a gateway does not pass it on."
        raise ApiError("failed", message, code="router_failed")

    def begun(self, api: ApiRequest, target: str) -> None:
        """See :class:`engine.service.attempts.Places`."""
        self._placing_of(api.model).begun(api, target)

    def _placing_of(self, model: str) -> Placing:
        if model not in self.placing:
            self.placing[model] = Placing(self.make_router())
        return self.placing[model]

    def not_ready(self) -> str | None:
        """Why no request is taken now; ``None``: every name can answer. A model that other names stand for, too, may be
        without a target: they do without it."""
        if self.admission.leaving:
            return "draining"
        if not (models := self.targets.models):
            return ", ".join(f"{target.id}: {target.why_not}" for target in self.targets.values())
        others = {model for names in self.gateway.models.values() for model in names} - {*self.gateway.models}
        lost = [name for name in models if name not in others and not self._takes(name)]
        return f"no target takes requests for {', '.join(map(self._named, lost))}" if lost else None

    def _named(self, name: str) -> str:
        """With the models that it stands for, where it stands for others."""
        models = self.gateway.models.get(name, [name])
        return name if models == [name] else f"{name} ({', '.join(models)})"

    def _takes(self, name: str) -> bool:
        """Whether a target takes requests for one of the models that a name stands for."""
        return any(taking(self.targets.having(model)) for model in self.targets.serving(name)[1])


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*map(repr, names[:MOST_LISTED]), *["..."] * (len(names) > MOST_LISTED)])


def _line(reason: str) -> str:
    """As a header may have it."""
    return "".join([letter for letter in " ".join(reason.split()) if letter.isprintable()])[:MOST_REASON]


def _view(model: str, targets: list[Target]) -> ModelView:
    lengths = [length for target in targets if (length := target.max_len(model)) is not None]
    return ModelView(model, alive=bool(taking(targets)), max_len=max(lengths, default=None))


GATEWAY: web.AppKey[GatewayState] = web.AppKey("gateway", GatewayState)


def gateway_of(http: web.Request) -> GatewayState:
    return http.app[GATEWAY]
