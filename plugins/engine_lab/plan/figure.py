"""A number and where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["measured", "simulated", "estimated", "stated", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """``stated``: by the user or by a price list; ``none``: what it follows from was not given."""

    value: float | None
    origin: Origin

    @staticmethod
    def of(value: float | None, origin: Origin) -> Figure:
        """Unknown where there is no value."""
        return Figure(value, "unknown" if value is None else origin)


UNKNOWN = Figure(None, "unknown")
NOT_GIVEN = Figure(None, "none")
