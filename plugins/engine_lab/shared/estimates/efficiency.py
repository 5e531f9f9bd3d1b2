"""What of a step no data sheet states."""

from __future__ import annotations

from dataclasses import dataclass

from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.estimates.reading import read


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How near to its data sheet a device comes, and what a step takes beside. Inputs, each with a source."""

    bandwidth: float
    """Share of the bandwidth at which weights, keys and values are read."""
    layer_us: float
    """Of each layer, whatever it computes: starts and ends of kernels, norms, and the host's share."""
    mixture_us: float = 0.0
    """The same of each mixture of experts: choosing, sorting."""
    collective: float = 1.0
    """A collective inside of a step, in units of the figure for one by itself."""
    flops: float = 0.6
    """Share of the peak that large products reach."""
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("bandwidth", "flops"):
            if not 0.0 < getattr(self, key) <= 1.0:
                raise EstimateError(f"efficiency: {key} {getattr(self, key)}, expected more than 0 and at most 1")
        for key in ("layer_us", "mixture_us", "collective"):
            if not getattr(self, key) >= 0.0:
                raise EstimateError(f"efficiency: {key} {getattr(self, key)}, expected at least 0")


SERVING = Efficiency(
    bandwidth=0.80,
    layer_us=37.0,
    mixture_us=32.0,
    source="fitted to 13 published figures of decode steps on A100, H100 and H200; flops: assumed",
)
"""What other serving engines have reached on GPUs (docs/parallelism.md says which): not measured of this one."""


def efficiency_from(values: object) -> Efficiency:
    """As read from JSON: ``bandwidth`` and ``layer_us``, and any other field. Raises :class:`EstimateError`."""
    return read(Efficiency, values, "efficiency")
