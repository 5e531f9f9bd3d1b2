"""``engine bench --versus URL``: two servers, A and B, the same bursts of requests to both in turns.

A pair is a burst to each, in the order ABBA or BAAB, so that a drift of the machine meets both alike. A burst is one
observation: its requests wait for each other. Ratios are estimated as those of ``engine ladder``.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.contracts.percentiles import FEWEST
from engine_lab.bench.client import Client, connected, go_on
from engine_lab.bench.options import BenchOptions
from engine_lab.bench.report import show
from engine_lab.bench.result import Result
from engine_lab.shared.pairs import before_first
from engine_lab.shared.statistics import LEVEL, paired_ratio

SCHEMA = "engine-bench-versus/1"
MOST_INVALID = 0.1
"""Of all bursts, in which the client itself was late."""
SAME_LENGTH = 0.02
SIDES = ("a", "b")
UNDECIDED, UNFINISHED, INVALID = "no winner", "unfinished", "invalid"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a burst."""

    label: str
    section: str
    key: str
    rank: str = ""
    is_less_better: bool = True

    def of(self, result: Result) -> float | None:
        found = result[self.section][self.key]
        value = found[self.rank] if self.rank else found
        return None if value is None else float(value)


FIGURES = (
    Figure("TTFT P50 (ms)", "metrics", "ttft_ms", "p50"),
    Figure("TTFT P95 (ms)", "metrics", "ttft_ms", "p95"),
    Figure("ITL mean (ms)", "metrics", "itl_ms", "mean"),
    Figure("ITL P95 (ms)", "metrics", "itl_ms", "p95"),
    Figure("E2E P50 (ms)", "metrics", "e2e_ms", "p50"),
    Figure("output tokens/s", "throughput", "output_tokens_per_s", is_less_better=False),
)


async def measure(options: BenchOptions) -> Result:
    """All pairs of bursts, up to an interruption. Raises ``ProbeError`` or ``ValueError`` where a server or the options
    cannot be used."""
    assert options.versus is not None
    nonce = options.nonce or secrets.token_hex(4)
    pairs: list[tuple[Result, Result]] = []
    is_over = False
    async with connected(options, f"{nonce}a") as a:
        options_b = replace(options, url=options.versus)
        async with connected(options_b, f"{nonce}b", a.calibration) as b:
            order = before_first(f"{options.seed}/{options.versus}", options.pairs)
            try:
                for index, is_a_first in enumerate(order):
                    first, second = (a, b) if is_a_first else (b, a)
                    pair = await _burst(first, index), await _burst(second, index)
                    pairs.append(pair if is_a_first else pair[::-1])
                    print(f"pair {index + 1} of {options.pairs}", file=sys.stderr)
            except asyncio.CancelledError:
                is_over = True
                go_on()
            return summarise(pairs, options, (a.describe(options), b.describe(options_b)), is_over)


async def _burst(client: Client, index: int) -> Result:
    """A trace has the same prompts in every burst, but for the nonce. Raises ``CancelledError``."""
    if client.schedule is not None:
        client = client.renamed(f"{client.workload.nonce}{index}")
    result = await client.run(client.options, f"burst {index}")
    if result["interrupted"]:
        raise asyncio.CancelledError
    return result


def summarise(
    pairs: Sequence[tuple[Result, Result]],
    options: BenchOptions,
    configs: tuple[dict[str, Any], dict[str, Any]],
    interrupted: bool,
) -> Result:
    """Medians of bursts and ratios of their pairs."""
    bursts = [burst for pair in pairs for burst in pair]
    late = [burst for burst in bursts if not burst["valid"]]
    is_valid = len(late) <= MOST_INVALID * len(bursts)
    unjudged = INVALID if not is_valid else UNFINISHED if len(pairs) < options.pairs else ""
    return {
        "schema": SCHEMA,
        "config": {"a": configs[0], "b": configs[1], "pairs": options.pairs},
        "valid": is_valid,
        "interrupted": interrupted,
        "pairs": len(pairs),
        "late_bursts": len(late),
        "late_example": late[0]["invalid_reasons"][0] if late else "",
        "requests": {key: sum(burst["requests"][key] for burst in bursts) for key in ("sent", "ok")},
        "figures": [found for figure in FIGURES if (found := compared(figure, pairs, unjudged)) is not None],
        "prompt_tokens": [_each([pair[side] for pair in pairs], "prompt") for side in (0, 1)],
        "answer_tokens": [_each([pair[side] for pair in pairs], "output") for side in (0, 1)],
        "bursts": pairs,
    }


def compared(figure: Figure, pairs: Sequence[tuple[Result, Result]], unjudged: str) -> dict[str, Any] | None:
    """``None`` where not every burst has it. ``unjudged``: why no winner may be named."""
    values = [(figure.of(a), figure.of(b)) for a, b in pairs]
    a = [x for x, _ in values if x]
    b = [y for _, y in values if y]
    if not pairs or len(a) < len(pairs) or len(b) < len(pairs):
        return None
    ratio = paired_ratio(a, b)
    interval = ratio.interval
    verdict = unjudged or UNDECIDED
    if not unjudged and ratio.excludes(1.0):
        verdict = "b is better" if (ratio.value < 1.0) == figure.is_less_better else "a is better"
    return {
        "label": figure.label,
        "a": median(a),
        "b": median(b),
        "ratio": ratio.value,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "verdict": verdict,
    }


def _each(results: Sequence[Result], key: str) -> float | None:
    """Mean tokens of a request; ``None`` where a server does not say."""
    tokens = [result["tokens"][key] for result in results]
    requests = sum(result["requests"]["ok"] for result in results)
    return None if not requests or None in tokens else sum(tokens) / requests


def render(result: Result) -> RenderableType:
    """A row a figure, and what is to be known beside them."""
    configs = result["config"]
    head = [Text(f"{side}: {configs[side]['model']} at {configs[side]['url']}") for side in SIDES]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("a", "b", "b / a", f"[{LEVEL:.0%}]"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for found in result["figures"]:
        table.add_row(*cells(found))
    return Group(*head, table, *(Text(line) for line in notes(result)))


def cells(found: dict[str, Any]) -> list[str]:
    """The row of a figure: both sides, their ratio with its interval, and what it says."""
    between = "-" if found["low"] is None else f"{found['low']:.3f}-{found['high']:.3f}"
    return [found["label"], show(found["a"]), show(found["b"]), f"{found['ratio']:.3f}", between, found["verdict"]]


def notes(result: Result) -> list[str]:
    """Everything besides the ratios, a line each."""
    configs, requests = result["config"], result["requests"]
    lines = [
        f"{result['pairs']} of {configs['pairs']} pairs of bursts, in the order ABBA or BAAB; {configs['a']['load']}",
        f"{requests['ok']} of {requests['sent']} requests ok; a and b are medians of bursts, b / a is the "
        "Hodges-Lehmann estimate of their paired ratios",
    ]
    for what in ("prompt", "answer"):
        a, b = result[f"{what}_tokens"]
        if a is None or b is None:
            lines.append(f"tokens of {what}s: not reported by both")
        elif abs(b / a - 1.0) > SAME_LENGTH:
            lines.append(f"tokens of {what}s differ: {a:.1f} and {b:.1f} on average, which the figures include")
    if result["pairs"] and not any(found["label"].startswith("TTFT P95") for found in result["figures"]):
        lines.append(f"TTFT P95 needs {FEWEST[95]} requests a burst (--requests)")
    if result["late_bursts"]:
        told = "" if result["valid"] else "INVALID, no winner is named: "
        lines.append(
            f"{told}{result['late_bursts']} of {2 * result['pairs']} bursts had a late client, as in: "
            f"{result['late_example']}"
        )
    if result["interrupted"]:
        lines.append("interrupted: the pair that was running is left out, and no winner is named")
    return lines
