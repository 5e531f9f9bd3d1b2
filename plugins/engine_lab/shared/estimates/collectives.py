"""What an all-reduce takes, by published or measured figures.

Between two figures of a curve the time is a power of bytes: nearly constant where latency counts, nearly proportional
where bandwidth does. Below the first figure it stays as it is; beyond the last one further bytes cross links at their
rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.estimates.reading import read

KIB, MIB = 2**10, 2**20
RATE = 0.7
"""Of a link's bandwidth, that large sums use: an assumption, not a measurement."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a table: an all-reduce of ``num_bytes`` over ``ranks`` took ``us`` microseconds."""

    method: str
    ranks: int
    """0: not stated."""
    num_bytes: int
    us: float
    device: str
    source: str
    label: str = "published"
    """``published`` by others, or ``measured`` here."""

    def __post_init__(self) -> None:
        if self.ranks < 0 or self.ranks == 1 or self.num_bytes < 1 or not self.us > 0:
            raise EstimateError(
                f"figure of {self.method}: {self.num_bytes} bytes over {self.ranks} ranks in {self.us} us, expected "
                "positive numbers and at least 2 ranks, or 0 if that is not stated"
            )


PUBLISHED = (
    Figure("NCCL", 8, 128, 19.0, "H100", "ByteDance-Seed/Triton-distributed#57"),
    Figure("NCCL", 8, 512 * KIB, 25.0, "H100", "ByteDance-Seed/Triton-distributed#57"),
    Figure("NCCL", 4, 512 * KIB, 21.0, "H100", "vllm-project/vllm#24532"),
    Figure("NCCL", 0, 8 * KIB, 22.0, "not named", "symm-mem-recipes PR 3"),
    Figure("NCCL", 0, 64 * KIB, 24.0, "not named", "symm-mem-recipes PR 3"),
    Figure("one-shot", 2, 512 * KIB, 7.0, "H100", "vllm-project/vllm#24111"),
    Figure("one-shot", 4, 512 * KIB, 10.0, "H100", "vllm-project/vllm#24532"),
    Figure("one-shot", 0, 8 * KIB, 10.8, "not named", "symm-mem-recipes PR 3"),
    Figure("one-shot", 0, 64 * KIB, 12.2, "not named", "symm-mem-recipes PR 3"),
    Figure("two-shot", 4, 512 * KIB, 16.0, "H100", "vllm-project/vllm#24532"),
    Figure("two-shot", 0, 8 * KIB, 15.0, "not named", "symm-mem-recipes PR 3"),
    Figure("two-shot", 0, 64 * KIB, 16.0, "not named", "symm-mem-recipes PR 3"),
    Figure("multimem", 4, 512 * KIB, 15.0, "H100", "vllm-project/vllm#24532"),
    Figure("multimem", 0, 8 * KIB, 11.4, "not named", "symm-mem-recipes PR 3"),
    Figure("multimem", 0, 64 * KIB, 11.7, "not named", "symm-mem-recipes PR 3"),
)
"""bfloat16, one machine, NVLink. Where a source gives a range of times for a range of sizes, its two ends are figures.
Left out: sums fused with norms, and cards of another generation (B300: vllm-project/vllm#37756)."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """The figures of one method, and the links that large sums cross."""

    method: str
    figures: tuple[Figure, ...]
    link: float
    """Bytes/s, in one direction."""

    @property
    def labels(self) -> str:
        """Where the figures are from."""
        return ", ".join(sorted({figure.label for figure in self.figures}))

    def all_reduce_us(self, num_bytes: int, ranks: int) -> float:
        """Microseconds of a sum of ``num_bytes`` over ``ranks``."""
        if ranks < 1 or num_bytes < 0:
            raise EstimateError(f"all-reduce of {num_bytes} bytes over {ranks} ranks, expected at least 0 and 1")
        if ranks == 1:
            return 0.0
        curve = self._curve(ranks)
        if num_bytes <= curve[0][0]:
            return curve[0][1]
        for (low, low_us), (high, high_us) in pairwise(curve):
            if num_bytes <= high:
                share = math.log(num_bytes / low) / math.log(high / low)
                return low_us * math.pow(high_us / low_us, share)
        end, end_us = curve[-1]
        return end_us + self._crossing_us(num_bytes - end, ranks)

    def all_gather_us(self, num_bytes: int, ranks: int) -> float:
        """Of ``num_bytes`` on every rank afterwards. Nobody has published it: taken as a sum that crosses links half
        as often."""
        return self.all_reduce_us(num_bytes // 2, ranks)

    def send_us(self, num_bytes: int) -> float:
        """From one rank to another: taken as a sum over two."""
        return self.all_reduce_us(num_bytes, 2)

    def _crossing_us(self, num_bytes: int, ranks: int) -> float:
        """A ring, or two shots: each byte is read and written once by all but one rank."""
        return 2.0 * (ranks - 1) / ranks * num_bytes / (RATE * self.link) * 1e6

    def _curve(self, ranks: int) -> Sequence[tuple[int, float]]:
        """Bytes and microseconds, rising: of as many ranks, else of the nearest number that is stated, of two that are
        as near the larger; where none is stated, of the others."""
        stated = {figure.ranks for figure in self.figures if figure.ranks}
        nearest = min(stated, key=lambda known: (abs(math.log(known / ranks)), -known), default=0)
        return sorted((figure.num_bytes, figure.us) for figure in self.figures if figure.ranks == nearest)


def collectives(method: str, link: float, figures: Iterable[Figure] = PUBLISHED) -> Collectives:
    """Of one method, in upper or lower case. Raises :class:`EstimateError` where there is no figure of it."""
    figures = tuple(figures)
    found = tuple(figure for figure in figures if figure.method.lower() == method.lower())
    if not found:
        known = ", ".join(dict.fromkeys(figure.method for figure in figures))
        raise EstimateError(f"all-reduce {method!r}: no figures of it; expected one of {known}")
    return Collectives(found[0].method, found, link)


def figures_from(values: object) -> tuple[Figure, ...]:
    """As read from JSON: a list of objects with the fields of :class:`Figure`. Raises :class:`EstimateError`."""
    if not isinstance(values, list):
        raise EstimateError(f"figures: {values!r}, expected a list of objects")
    return tuple(read(Figure, each, f"figure {number}") for number, each in enumerate(values))
