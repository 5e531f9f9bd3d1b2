"""Classes of requests, and what their clients are promised."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from engine.contracts.config.checks import at_least

_CLASS = re.compile(r"[A-Za-z0-9_\-]{1,64}")


@dataclass(frozen=True)
class SloClass:
    """A class of requests by what its clients are promised (a service level objective)."""

    ttft_ms: float = 0.0
    """The first token should come so long after the request: what waits is served in the order of these due times."""
    itl_ms: float = 0.0
    """While one of its requests decodes, steps should take no longer than this; 0: ``scheduler.itl_target_ms``."""
    refuse_late: bool = False
    """A request whose first token is expected too late is answered 429 at once."""
    cancel_late: bool = False
    """A request is ended once its first token is late."""


@dataclass(frozen=True)
class SloSettings:
    """Classes of requests, see `Classes` in ``docs/serving.md``."""

    classes: dict[str, SloClass] = field(default_factory=dict)
    """By name. Keys say which of them their holders may use (``server.keys``); requests ask with the header
    ``X-SLO-Class``."""
    default: str = ""
    """The class of requests that ask for none; empty: that with the longest ``ttft_ms``."""
    late_s: float = 10.0
    """How long a request that is late already makes way for those that can still be in time."""

    def __post_init__(self) -> None:
        for name, one in self.classes.items():
            if not _CLASS.fullmatch(name):
                raise ValueError(f"slo.classes: {name!r} is no name; expected letters, digits, '-' and '_', at most 64")
            at_least(f"slo.classes.{name}.ttft_ms", one.ttft_ms, 1)
            at_least(f"slo.classes.{name}.itl_ms", one.itl_ms, 0)
        if self.default and self.default not in self.classes:
            names = ", ".join(self.classes) or "none"
            raise ValueError(f"slo.default={self.default}: expected one of slo.classes ({names})")
        at_least("slo.late_s", self.late_s, 0)

    @property
    def usual(self) -> str:
        """The class of a request that asks for none; empty: there are no classes."""
        return self.default or max(self.classes, key=lambda name: self.classes[name].ttft_ms, default="")
