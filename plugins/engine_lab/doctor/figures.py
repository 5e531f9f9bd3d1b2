"""The figures of a window: from two readings of an engine's counters, looks at its queue between them, and the requests
that ended meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from engine.contracts.percentiles import describe
from engine.counters import declared
from engine.machine import MachineUse
from engine_lab.doctor.classes import long_from
from engine_lab.doctor.evidence import Figures
from engine_lab.shared.live import Sample, quantile

Series = dict[tuple[str, str], float]
"""Values by a metric's name and its label ``le``, ``kind`` or ``finish_reason``, summed over all others."""
ARRIVAL_BIN_S = 0.25
COUNTERS = {
    "steps": declared.STEP.count,
    "rejected": declared.REJECTED.name,
    "aborted": declared.ABORTS.name,
    "preemptions": declared.PREEMPTIONS.name,
    "drafted": declared.DRAFTED_TOKENS.name,
    "accepted": declared.ACCEPTED_TOKENS.name,
    "chains": declared.DRAFT_CHAINS.name,
    "itl_count": declared.ITL.count,
}
STEP_MEANS = {
    "step_ms": (declared.STEP.sum, 1e3),
    "host_ms": (declared.STEP_HOST.sum, 1e3),
    "device_ms": (declared.STEP_DEVICE.sum, 1e3),
    "gap_ms": (declared.STEP_GAP.sum, 1e3),
    "rows": (declared.STEP_REQUESTS.sum, 1.0),
    "draft_ms": (declared.DRAFT_SECONDS.name, 1e3),
}
COSTS = ("base_ms", "per_row_ms", "per_token_ms", "per_decode_context_ms", "per_prefill_context_ms")
STEP_COST = ("cost.base_ms", "cost.per_row_ms", "cost.per_token_ms")
"""What every step has, its context apart."""
SPANS = ("receive", "tokenize", "route", "dispatch", "queue", "prefill", "decode", "deliver")
MEANING = {
    "seconds": "length of the window",
    "requests": "that ended with stop or length",
    "aborted": "requests whose client left",
    "rejected": "requests refused",
    "prompt_mean": "tokens",
    "prompt_p50": "tokens",
    "prompt_max": "tokens",
    "cached_share": "of prompt tokens, from the prefix cache",
    "output_mean": "tokens",
    "output_max": "tokens",
    "max_tokens_p50": "asked for",
    "length_share": "of requests, ended at max_tokens",
    "long_share": "of requests, with a long prompt: several times as long as the short ones",
    "long_computed": "mean prompt tokens of the long ones that were not cached",
    "short_prompt": "mean prompt tokens of the others",
    "drafts_well_share": "of requests with drafts, had a draft token accepted in two verifications of three, or more",
    "stream_share": "of requests",
    "preempted_share": "of requests",
    "ttft_p50_ms": "",
    "ttft_p95_ms": "",
    "e2e_mean_ms": "",
    "first_text_ms": "until the client has the first text: TTFT of a streamed answer, E2E of another; mean",
    **{f"{name}_ms": "mean of the span" for name in SPANS},
    "writing_ms": "mean time in writes to the client",
    "unread_ms": "mean time that a client's receive buffer was full",
    "probe_first_ms": "of a small request to --url, until its first text came back",
    "probe_spread_ms": "of the same, from its first text to its last",
    "probe_decode_ms": "of the same, from its first token to its last in the engine",
    "arrivals_dispersion": f"variance / mean of arrivals in {ARRIVAL_BIN_S:g} s; about 1 for independent ones",
    "itl_mean_ms": "per token",
    "itl_p10_ms": "per token",
    "itl_p50_ms": "per token",
    "itl_p999_ms": "per token; of fewer than 1,000 nearly the longest",
    "itl_count": "tokens that ITL is of",
    "steps": "",
    "step_ms": "mean",
    "host_ms": "mean of a step",
    "device_ms": "mean of a step",
    "gap_ms": "mean before a step",
    "draft_ms": "mean time in the drafter, of a step",
    "rows": "mean requests in a step",
    "busy_share": "of the window, with steps on the device",
    "preemptions": "",
    "waiting_for_core": "share of the time that the engine's threads wanted a core, without one",
    "others_cpus": "CPUs that other processes used, on average",
    "stolen_share": "of the time of all CPUs, taken by the hypervisor",
    "throttled_share": "of the time, stopped by the CPU limit of a control group",
    "cpus": "that the engine may use",
    "drafted": "draft tokens verified",
    "accepted": "draft tokens accepted",
    "chains": "verifications",
    "running_mean": "requests",
    "running_max": "requests",
    "waiting_mean": "requests",
    "waiting_share": "of looks, with requests waiting",
    "waiting_growth": "waiting requests in the last third less those in the first",
    "kv_used_max": "share of KV blocks",
    **{f"cost.{name}": "of the step cost" for name in COSTS},
    "explained": "requests whose prompt was compared with those before it",
    "shared_share": "of a prompt, equal to the beginning of one before it",
    "early_share": "of explained prompts' computed tokens: differ in a short text and go on alike",
    "order_share": "of the same: have the parts of another in another order",
    "evicted_share": "of the same: share text that was not in the cache",
    "breakpoint_share": "of explained prompts with cache breakpoints, before the last one",
    "moved_share": "of explained prompts with cache breakpoints, share no beginning up to one",
    "chunk_max": "most prompt tokens of one request in a step",
    "chunks_mean": "steps that a prompt took",
    "stalled_share": "of explained requests, decoded beside another's prompt",
    "beside_max": "most tokens of another's prompt that an explained request decoded beside",
}
"""Every figure, and what it is where its name does not say."""


@dataclass(frozen=True, slots=True)
class Look:
    """At ``/engine/stats``."""

    running: int
    waiting: int
    kv_used: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a window is made of."""

    seconds: float
    before: Series
    after: Series
    looks: Sequence[Look]
    requests: Sequence[dict[str, Any]]
    """Of ``/engine/requests``, those that ended in it."""
    details: Sequence[dict[str, Any]]
    """Of ``/engine/requests/ID``, some of them."""
    cost: dict[str, Any] | None
    """Of ``/engine/stats``."""
    machine: MachineUse | None = None
    """Of the same, first look to last."""
    probe: Figures = field(default_factory=dict)
    """What a request through ``--url`` met."""


def figures_of(seen: Seen) -> Figures:
    """Only what is known: no figure is NaN."""
    found = {
        "seconds": seen.seconds,
        **_of_counters(seen),
        **_of_looks(seen.looks),
        **_of_machine(seen.machine),
        **_of_requests([each for each in seen.requests if each["finish_reason"] in ("stop", "length")]),
        **_of_details(seen.details),
        **seen.probe,
    }
    if seen.cost and any(seen.cost["cost"][name] for name in COSTS):  # else nothing is fitted
        found |= {f"cost.{name}": seen.cost["cost"][name] for name in COSTS}
    return {name: float(f"{value:.5g}") for name, value in found.items() if math.isfinite(value)}


MACHINE = {
    "waiting": "waiting_for_core",
    "others": "others_cpus",
    "stolen": "stolen_share",
    "throttled": "throttled_share",
}


def _of_machine(machine: MachineUse | None) -> Figures:
    if machine is None:
        return {}
    known = {figure: getattr(machine, name) for name, figure in MACHINE.items()}
    return {"cpus": machine.cpus} | {figure: value for figure, value in known.items() if value is not None}


def machine_of(figures: Figures) -> MachineUse:
    """The machine in a window."""
    known = {name: figures.get(figure) for name, figure in MACHINE.items()}
    return MachineUse(cpus=int(figures.get("cpus", 0)), stalled=None, load=None, **known)


def decode_row_ms(figures: Figures) -> float:
    """What one more row that decodes adds to a step, its context apart."""
    return figures["cost.per_row_ms"] + figures["cost.per_token_ms"]


def series_of(samples: Iterable[Sample]) -> Series:
    found: Series = {}
    for sample in samples:
        label = next((sample.labels[key] for key in ("le", "kind", "finish_reason") if key in sample.labels), "")
        key = (sample.name, label)
        found[key] = found.get(key, 0.0) + sample.value
    return found


def look_of(stats: dict[str, Any]) -> Look:
    used = max((group["leased"] / group["total"] for group in stats["blocks"] if group["total"]), default=0.0)
    return Look(stats["running"], stats["waiting"], used)


def _of_counters(seen: Seen) -> Figures:
    def gained(name: str, label: str = "") -> float:
        return seen.after.get((name, label), 0.0) - seen.before.get((name, label), 0.0)

    found = {name: sum(gained(metric, label) for metric, label in seen.after if metric == wanted)
             for name, wanted in COUNTERS.items()}  # fmt: skip
    if found["steps"]:
        found |= {name: gained(metric) * unit / found["steps"] for name, (metric, unit) in STEP_MEANS.items()}
        found["busy_share"] = found["steps"] * found["device_ms"] / 1e3 / seen.seconds
    if found["itl_count"]:
        found["itl_mean_ms"] = gained(declared.ITL.sum) * 1e3 / found["itl_count"]
        bounds = [label for metric, label in seen.after if metric == declared.ITL.bucket]
        buckets = {float(label): gained(declared.ITL.bucket, label) for label in bounds}
        for name, share in (("itl_p10_ms", 0.1), ("itl_p50_ms", 0.5), ("itl_p999_ms", 0.999)):
            found[name] = quantile(share, buckets) * 1e3
    return found


def _of_looks(looks: Sequence[Look]) -> Figures:
    if not looks:
        return {}
    third = max(1, len(looks) // 3)
    waiting = [look.waiting for look in looks]
    return {
        "running_mean": fmean(look.running for look in looks),
        "running_max": max(look.running for look in looks),
        "waiting_mean": fmean(waiting),
        "waiting_share": fmean(count > 0 for count in waiting),
        "waiting_growth": fmean(waiting[-third:]) - fmean(waiting[:third]),
        "kv_used_max": max(look.kv_used for look in looks),
    }


def _of_requests(requests: Sequence[dict[str, Any]]) -> Figures:
    if not requests:
        return {"requests": 0.0}
    prompts, outputs = column(requests, "prompt_tokens"), column(requests, "output_tokens")
    ttfts = column(requests, "ttft_ms")
    found = {
        "requests": len(requests),
        "prompt_mean": fmean(prompts),
        "prompt_p50": median(prompts),
        "prompt_max": max(prompts),
        "cached_share": sum(column(requests, "cached_tokens")) / max(1.0, sum(prompts)),
        "output_mean": fmean(outputs),
        "output_max": max(outputs),
        "max_tokens_p50": median(column(requests, "max_tokens")),
        "stream_share": fmean(each["stream"] is not False for each in requests),
        "preempted_share": fmean(each["preemptions"] > 0 for each in requests),
        "ttft_p50_ms": median(ttfts),
        "e2e_mean_ms": fmean(column(requests, "total_ms")),
        "first_text_ms": fmean(each["total_ms" if each["stream"] is False else "ttft_ms"] for each in requests),
        "writing_ms": fmean(each["meanwhile"]["write_ms"] for each in requests),
        "unread_ms": fmean(each["meanwhile"]["unread_ms"] for each in requests),
        "length_share": fmean(each["finish_reason"] == "length" for each in requests),
        **_of_lengths(requests),
    }
    drafted = [each["accepted_tokens"] >= each["draft_chains"] * 2 / 3 for each in requests if each["draft_chains"]]
    found["drafts_well_share"] = fmean(drafted) if drafted else 0.0
    if (p95 := describe([(ttft, 1) for ttft in ttfts])["p95"]) is not None:
        found["ttft_p95_ms"] = p95
    found |= {f"{name}_ms": fmean(each["spans"].get(name, 0.0) for each in requests) for name in SPANS}
    return found | dispersion([-each["ended_s_ago"] - each["total_ms"] / 1e3 for each in requests])


def _of_lengths(requests: Sequence[dict[str, Any]]) -> Figures:
    limit = long_from(column(requests, "prompt_tokens"))
    long = [each for each in requests if each["prompt_tokens"] >= limit]
    short = [each for each in requests if each["prompt_tokens"] < limit]
    if not long:
        return {"long_share": 0.0, "long_computed": 0.0, "short_prompt": fmean(column(short, "prompt_tokens"))}
    return {
        "long_share": len(long) / len(requests),
        "long_computed": fmean(each["prompt_tokens"] - each["cached_tokens"] for each in long),
        "short_prompt": fmean(column(short, "prompt_tokens")),
    }


def dispersion(arrivals_s: Sequence[float]) -> Figures:
    """Of the numbers that arrived in equal stretches of time."""
    first, last = min(arrivals_s), max(arrivals_s)
    bins = int((last - first) / ARRIVAL_BIN_S) + 1
    if bins < 8 or len(arrivals_s) < 8:
        return {}
    counts = Counter(int((arrival - first) / ARRIVAL_BIN_S) for arrival in arrivals_s)
    mean = len(arrivals_s) / bins
    return {"arrivals_dispersion": sum((counts[i] - mean) ** 2 for i in range(bins)) / bins / mean}


def _of_details(details: Sequence[dict[str, Any]]) -> Figures:
    spans = [{span["name"]: span for span in each["spans"]} for each in details]
    found = {"explained": 0.0, **_of_steps(spans)}
    explained = [each for each in details if each.get("prefix", {}).get("shared_tokens") is not None]
    if explained:
        computed = dict.fromkeys(("inserted", "order", "evicted"), 0.0)
        for each in explained:  # by what they cost: many small prompts that are found do not hide a large one
            kind = each["prefix"]["kind"]
            computed[kind] = computed.get(kind, 0.0) + each["prompt_tokens"] - each["cached_tokens"]
        whole = max(1.0, sum(computed.values()))
        found |= {
            "explained": len(explained),
            "shared_share": sum(each["prefix"]["shared_tokens"] for each in explained)
            / sum(each["prompt_tokens"] for each in explained),
            "early_share": computed["inserted"] / whole,
            "order_share": computed["order"] / whole,
            "evicted_share": computed["evicted"] / whole,
        }
    if marked := [each for each in explained if "breakpoint" in each["prefix"]]:
        before = sum(each["prefix"]["breakpoint"] for each in marked)
        found |= {
            "breakpoint_share": before / sum(each["prompt_tokens"] for each in marked),
            "moved_share": fmean(not each["prefix"]["breakpoint_shared"] for each in marked),
        }
    return found


def _of_steps(spans: Sequence[dict[str, dict[str, Any]]]) -> Figures:
    chunks = [
        [
            inside["num_tokens"]
            for span in each.values()
            for inside in span.get("inside", ())
            if inside["name"] == "chunk"
        ]
        for each in spans
    ]
    decodes = [each["decode"] for each in spans if each.get("decode", {}).get("steps")]
    found: Figures = {}
    if sizes := [size for each in chunks for size in each]:
        found |= {"chunk_max": max(sizes), "chunks_mean": len(sizes) / sum(1 for each in chunks if each)}
    if decodes:
        found["stalled_share"] = fmean("blocked_by" in span for span in decodes)
        found["beside_max"] = max(span.get("blocked_by", {}).get("num_tokens", 0) for span in decodes)
    return found


def column(requests: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [each[name] for each in requests]
