"""The requests that a plan is for: lengths, rate and a shared prefix, as on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from engine_lab.bench.distribution import Distribution, parse_distribution
from engine_lab.bench.workload import Workload, arrivals
from engine_lab.shared.simulation.trace import TraceRequest

REQUESTS = 300
"""As many as a 99th percentile needs."""
DEFAULT = "in=1024,out=256,rate=1"
KEYS = ("in", "out", "rate", "shared_prefix")
BLOCK = 16
"""Tokens of a block of a shared prefix; blocks of the engine may be larger."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What is asked of the engine. ``rate``: requests per second, Poisson; ``shared_prefix``: share of each prompt that
    all have in common."""

    prompt_tokens: Distribution
    output_tokens: Distribution
    rate: float
    shared_prefix: float = 0.0

    def __str__(self) -> str:
        shared = f",shared_prefix={self.shared_prefix:g}" if self.shared_prefix else ""
        return f"in={self.prompt_tokens},out={self.output_tokens},rate={self.rate:g}{shared}"

    def requests(self, count: int, seed: int = 0, rate: float | None = None) -> list[TraceRequest]:
        """The lengths and arrival times that ``engine bench --prompt-ids`` sends with this seed. ``rate``: another one;
        infinite: all at once."""
        rate = self.rate if rate is None else rate
        times = iter(lambda: 0.0, None) if rate == float("inf") else arrivals(rate, seed)
        made = Workload(self.prompt_tokens, self.output_tokens, self.shared_prefix, 4.0, "plan", seed, "", 2)
        sizes = [(len(each.prompt), each.max_tokens) for each in islice(made.requests(), count)]
        names = _unique()
        return [
            TraceRequest(arrival, prompt, output, self._blocks(prompt, names), BLOCK)
            for arrival, (prompt, output) in zip(times, sizes, strict=False)
        ]

    def _blocks(self, prompt: int, names: Iterator[int]) -> tuple[int, ...]:
        if not self.shared_prefix:
            return ()
        common = round(prompt * self.shared_prefix) // BLOCK
        return (*range(common), *(next(names) for _ in range(-(-prompt // BLOCK) - common)))

    def bench(self, count: int, seed: int) -> str:
        """The command that measures what was predicted."""
        shared = f" --shared-prefix {self.shared_prefix:g}" if self.shared_prefix else ""
        return (
            f"engine bench --rate {self.rate:g} --requests {count} --prompt-tokens {self.prompt_tokens} "
            f"--output-tokens {self.output_tokens}{shared} --seed {seed} --ignore-eos --prompt-ids "
            "--endpoint completions"
        )


def _unique() -> Iterator[int]:
    """Names of blocks that nothing else has."""
    name = 1 << 40
    while True:
        name += 1
        yield name


def parse_workload(text: str) -> PlannedLoad:
    """``in=1024,out=lognormal:256,0.6,rate=2,shared_prefix=0.5``. Raises ``ValueError`` that names the part at fault
    and the accepted forms."""
    found: dict[str, str] = {}
    for part in re.split(r",(?=[a-z_]+=)", text):
        key, _, value = part.partition("=")
        if key not in KEYS or not value or key in found:
            raise ValueError(f"{part!r}: expected {', '.join(KEYS)}, each once, as in {DEFAULT}")
        found[key] = value
    if missing := [key for key in KEYS[:3] if key not in found]:
        raise ValueError(f"{text!r}: {missing[0]} is missing; expected for example {DEFAULT}")
    rate, shared = _number(found, "rate"), _number(found, "shared_prefix", "0")
    if not 0.0 < rate < float("inf"):
        raise ValueError(f"rate={found['rate']}: expected requests per second, more than 0")
    if not 0.0 <= shared <= 1.0:
        raise ValueError(f"shared_prefix={found['shared_prefix']}: expected a share from 0 to 1")
    return PlannedLoad(parse_distribution(found["in"]), parse_distribution(found["out"]), rate, shared)


def _number(found: dict[str, str], key: str, otherwise: str = "") -> float:
    text = found.get(key, otherwise)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}={text}: expected a number") from None
