"""What the clients of a class of requests are promised, and which class a request is of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from engine.contracts.config import SloClass, SloSettings
from engine.service.errors import ApiError, bad_request
from engine.service.keys import Caller

HEADER = "X-SLO-Class"
DEFAULT_CLASS = "default"
"""That of all requests where there are no classes."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A class, and its name."""

    name: str
    slo: SloClass

    def patient(self) -> Promise:
        """Of a request that nobody waits for: neither refused nor ended when it is late."""
        return Promise(self.name, replace(self.slo, refuse_late=False, cancel_late=False))

    def due_s(self, since_s: float) -> float:
        """When the first token of a request is due."""
        return since_s + self.slo.ttft_ms / 1e3


def promise(settings: SloSettings, caller: Caller | None, asked: str | None) -> Promise | None:
    """The class of a request: the one it asks for, or the first of its key, or the usual one. ``None``: there are none.
    Raises :class:`ApiError` ``invalid`` for a class that is not there, or not for this key."""
    allowed: Collection[str] = settings.classes
    if caller is not None:
        allowed = caller.slo or (settings.usual,)
    if asked is not None and asked not in allowed:
        raise bad_request(f"{HEADER}: {asked[:64]!r} is no class {_for(caller)}; expected {_listed(allowed)}.")
    name = asked or (caller.slo[0] if caller is not None and caller.slo else settings.usual)
    return Promise(name, settings.classes[name]) if name else None


def passed_on(caller: Caller | None, asked: str | None) -> str | None:
    """The class that a gateway asks its targets for, which know what classes there are. Raises :class:`ApiError`
    ``invalid`` for one that is not for this key."""
    if caller is None:
        return asked
    if asked is not None and asked not in caller.slo:
        raise bad_request(f"{HEADER}: {asked[:64]!r} is no class {_for(caller)}; expected {_listed(caller.slo)}.")
    return asked or next(iter(caller.slo), None)


def late(promised: Promise, why: str, retry_after_s: int = 1) -> ApiError:
    """The error of a request whose first token is not in time. ``why``: what it does instead."""
    target = f"class {promised.name} has {promised.slo.ttft_ms:.0f} ms (slo.classes)"
    return ApiError("overloaded", f"The first token {why}; {target}.", code="late", retry_after_s=max(retry_after_s, 1))


def _for(caller: Caller | None) -> str:
    return "of this server (slo.classes)" if caller is None else "for this key (slo in server.keys)"


def _listed(names: Collection[str]) -> str:
    return ", ".join(filter(None, names)) or "no such header"
