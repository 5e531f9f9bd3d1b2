"""What the metrics of an engine were, for as long as rules look back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, pairwise, takewhile

from engine_lab.shared.live import Sample

FINE_S, COARSE_EVERY_S = 1900.0, 300.0
"""For so long every scrape is kept; of older ones, one in so long."""
LONGEST_S = 3 * 86400.0

Scrape = Mapping[str, float]
"""By series, as Prometheus writes it without the labels of the engine: ``engine_ttft_seconds_bucket{le="0.5"}``."""


def scrape_of(samples: Iterable[Sample], names: Collection[str]) -> Scrape:
    """Samples of metrics of these names."""
    found = {}
    for sample in samples:
        if sample.name in names:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


class History:
    """Scrapes of one engine, bounded in number: at one in 15 s about 1,000."""

    def __init__(self) -> None:
        self._fine: deque[tuple[float, Scrape]] = deque()
        self._coarse: deque[tuple[float, Scrape]] = deque()
        self.known: dict[str, None] = {}
        """Every series that there was."""
        self.now_s = -math.inf
        """When rules are evaluated: at the last scrape."""

    def add(self, at_s: float, scrape: Scrape) -> None:
        """Times ascend."""
        assert at_s > self.now_s, "time goes on"
        self.now_s = at_s
        self._fine.append((at_s, scrape))
        self.known |= dict.fromkeys(scrape)
        while self._fine[0][0] < at_s - FINE_S:
            old = self._fine.popleft()
            if not self._coarse or old[0] >= self._coarse[-1][0] + COARSE_EVERY_S:
                self._coarse.append(old)
        while self._coarse and self._coarse[0][0] < at_s - LONGEST_S:
            self._coarse.popleft()

    @property
    def watched_s(self) -> float:
        """How far it reaches back."""
        first = next(chain(self._coarse, self._fine), None)
        return self.now_s - first[0] if first else 0.0

    def latest(self, series: str) -> float:
        """Of the last scrape; NaN if it has none."""
        return self._fine[-1][1].get(series, math.nan) if self._fine else math.nan

    def increase(self, series: str, window_s: float) -> float:
        """Of a counter within the window, as Prometheus' ``increase()`` has it: restarts are counted on, and the rate
        goes on to the ends of the window where samples come close to them. NaN with fewer than two samples."""
        first_s = self.now_s - window_s
        latest_first = takewhile(lambda kept: kept[0] >= first_s, chain(reversed(self._fine), reversed(self._coarse)))
        found = [(at_s, scrape[series]) for at_s, scrape in latest_first if series in scrape][::-1]
        if len(found) < 2:
            return math.nan
        values = [value for _, value in found]
        gained = values[-1] - values[0] + sum(before for before, after in pairwise(values) if after < before)
        sampled_s = found[-1][0] - found[0][0]
        apart_s = sampled_s / (len(found) - 1)
        to_start, to_end = found[0][0] - first_s, self.now_s - found[-1][0]
        if gained > 0:
            to_start = min(to_start, sampled_s * values[0] / gained)  # a counter was never below zero
        reach = sampled_s + sum(gap if gap < 1.1 * apart_s else apart_s / 2 for gap in (to_start, to_end))
        return gained * reach / sampled_s
