"""Service-level objectives as written on the command line: ``ttft=200ms,itl=20ms``."""

from __future__ import annotations

from dataclasses import dataclass

from engine_lab.bench.record import RequestRecord

LIMITS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; a request is good when it keeps all of them.

    ``itl`` is compared with the request's own 99th percentile, the others with its one value.
    """

    limits_ms: tuple[tuple[str, float], ...]

    def met_by(self, record: RequestRecord) -> bool | None:
        """``None``: the server does not count tokens, so it cannot be known. A failed request is not good."""
        if not record.ok:
            return False
        unknown = False
        for name, limit in self.limits_ms:
            if name in ("itl", "tpot") and record.output_tokens is None:
                unknown = True
            elif (value := record.slo_value(name)) is not None and value > limit:
                return False
        return None if unknown else True

    def __str__(self) -> str:
        return ",".join(f"{name}={limit:g}ms" for name, limit in self.limits_ms)


def parse_slo(text: str) -> Slo:
    """Raises ``ValueError`` that names the part at fault and the accepted forms."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        scale = 1.0
        if amount.endswith("ms"):
            number = amount[:-2]
        elif amount.endswith("s"):
            number, scale = amount[:-1], 1000.0
        else:
            number = "no unit"
        try:
            limit = float(number) * scale
        except ValueError:
            limit = -1.0
        if name not in LIMITS or not limit > 0 or name in limits:
            raise ValueError(f"{part!r}: expected {', '.join(LIMITS)} = a time in ms or s, as in ttft=200ms")
        limits[name] = limit
    return Slo(tuple(limits.items()))
