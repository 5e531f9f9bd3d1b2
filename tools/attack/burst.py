"""2,000 requests at once, and ten times as many as the server can answer for a minute.

Bar: every answer is 200, 429 or 503, the latter two with Retry-After 1 to 30 and, at p99, within 100 ms of the request
being sent; ``/health`` answers within 100 ms at p99 meanwhile; the API process grows by at most 64 MB; under overload,
at least 95 % of the requests a second that the server answers without it.

    python -m tools.attack.burst --requests 2000 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter

from tools.attack.client import COMPLETIONS, request
from tools.attack.crowd import Crowd, Outcome
from tools.attack.harness import Row, Target, arguments, peak_mb, percentile, reset_peak, rss_mb, run, target_of
from tools.attack.probe import Probe

REJECTED_MS, HEALTH_MS = 100.0, 100.0
GROWTH_MB, GOODPUT = 64.0, 0.95
OVERLOAD = 10
PEAK_S = 15.0
LAST_S = 120.0
"""How long the last answers may take to come."""
BURST = request(COMPLETIONS, {"prompt": "def main(", "max_tokens": 16, "ignore_eos": True}, "Connection: close")
LOAD = request(COMPLETIONS, {"prompt": "def main(", "max_tokens": 64, "ignore_eos": True}, "Connection: close")
PROBE_S = 0.02


async def attack(target: Target, requests: int, seconds: float) -> list[Row]:
    rows = await burst(target, requests)
    if seconds:
        rows += await overload(target, seconds)
    same = await target.same() and await target.engine() == target.engine_pid
    held = await target.held()
    return [
        *rows,
        Row("burst: canary", "afterwards", "the same" if same else "differs", "the same", same),
        Row("burst: blocks", "afterwards", held or "all free", "all free", not held),
    ]


async def burst(target: Target, requests: int) -> list[Row]:
    crowd = Crowd(target, BURST)
    outcomes, probe, growth = await watched(target, crowd, [0.0] * requests, LAST_S)
    return judged("burst", f"{requests} requests at once", outcomes, probe, growth)


async def overload(target: Target, seconds: float) -> list[Row]:
    peak = await capacity(target)
    due = [i / (peak * OVERLOAD) for i in range(int(peak * OVERLOAD * seconds))]
    crowd = Crowd(target, LOAD)
    outcomes, probe, growth = await watched(target, crowd, due, seconds + LAST_S)
    begun = min(outcome.sent_s for outcome in outcomes)
    answered = [o for o in outcomes if o.status == 200 and seconds / 4 <= o.done_s - begun <= seconds]
    goodput = len(answered) / (seconds * 3 / 4)
    tried = f"{OVERLOAD} x {peak:.1f} requests/s for {seconds:.0f} s"
    shown = f"{goodput:.1f} requests/s, {goodput / peak:.0%} of the peak"
    return [
        *judged("overload", f"{tried}, sent at most {crowd.late_s:.1f} s late", outcomes, probe, growth),
        Row("overload: goodput", tried, shown, f">= {GOODPUT:.0%}", goodput >= GOODPUT * peak, measured=True),
    ]


async def capacity(target: Target) -> float:
    """Requests a second with as many in flight as the engine has rows, and as many again that wait."""
    (scheduler,) = (await target.plan())["plan"]["slots"]["scheduler"]
    outcomes = await asyncio.to_thread(Crowd(target, LOAD).keep, 2 * scheduler["config"]["max_requests"], PEAK_S)
    await target.held()
    answered = sum(outcome.status == 200 for outcome in outcomes)
    if not answered:
        raise SystemExit(f"error: no request was answered within {PEAK_S:.0f} s, without any overload")
    return answered / PEAK_S


async def watched(target: Target, crowd: Crowd, due: list[float], limit_s: float) -> tuple[list[Outcome], Probe, float]:
    """The outcomes, the probe beside them, and by how many MB the API process grew at most."""
    before = rss_mb(target.api_pid)
    reset_peak(target.api_pid)
    with Probe(target, PROBE_S) as probe:
        outcomes = await asyncio.to_thread(crowd.send_at, due, limit_s)
    return outcomes, probe, peak_mb(target.api_pid) - before


def judged(name: str, tried: str, outcomes: list[Outcome], probe: Probe, growth: float) -> list[Row]:
    statuses = Counter(outcome.status for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.status in (429, 503)]
    slow = percentile([outcome.took_ms for outcome in refused], 99)
    told = all(outcome.retry_after is not None and 1 <= outcome.retry_after <= 30 for outcome in refused)
    health = percentile(probe.ms, 99)
    alive = f"p99 {health:.0f} ms, worst {probe.worst:.0f} ms"
    answers = ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))
    shown = f"p50 {percentile([o.took_ms for o in refused], 50):.0f} ms, p99 {slow:.0f} ms"
    return [
        Row(f"{name}: answers", tried, answers, "200, 429 or 503", set(statuses) <= {200, 429, 503}),
        Row(f"{name}: Retry-After", tried, "1 to 30" if told else "missing or out of range", "1 to 30", told),
        Row(f"{name}: refusals", tried, shown, f"p99 <= {REJECTED_MS:.0f} ms", slow <= REJECTED_MS, measured=True),
        Row(f"{name}: /health", tried, alive, f"p99 <= {HEALTH_MS:.0f} ms", health <= HEALTH_MS, measured=True),
        Row(f"{name}: memory", tried, f"{growth:.0f} MB", f"<= {GROWTH_MB:.0f} MB", growth <= GROWTH_MB, measured=True),
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        return await attack(target, options.requests, options.seconds)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, requests=2000, seconds=60.0).parse_args(), main))
