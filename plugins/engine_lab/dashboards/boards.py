"""The dashboards: overview, requests, KV cache, speculation."""

from __future__ import annotations

from engine.contracts.counters import Metric
from engine.counters import declared
from engine_lab.dashboards.model import Dashboard, Panel, Query, Row
from engine_lab.dashboards.queries import gauge, mean, quantile, quantiles, rate, selected, share

ATTAINED = share(declared.TTFT.bucket, declared.TTFT.count, 'le="$ttft_slo"')
FAILED = share(declared.REQUESTS, declared.REQUESTS, declared.REQUESTS.selector("error"))
UNREACHABLE = 'count(up{job=~"$job",instance=~"$instance"} == 0) or vector(0)'
PARTS = (("queue", declared.QUEUE), ("prefill", declared.PREFILL), ("decode", declared.DECODE))
TTFT_LIMITS = ("0.5", "0.1", "0.2", "1.0", "2.0", "30.0")
"""Bounds of buckets, as Prometheus writes them."""


def one(promql: str, legend: str = "") -> tuple[Query, ...]:
    return (Query(promql, legend),)


def split(metric: Metric) -> tuple[Query, ...]:
    """A line for each value of the metric's label."""
    return one(rate(metric, by=metric.label), f"{{{{{metric.label}}}}}")


def latency(title: str, histogram: Metric, says: str = "") -> Panel:
    return Panel(title, quantiles(histogram), "s", says=says)


LATENCIES = (
    latency("TTFT", declared.TTFT, "Arrival at the server to the first token leaving for the client."),
    latency("TTFO", declared.TTFO, "The same to the first text or call that is no thought."),
    latency("ITL", declared.ITL, "Between two output tokens."),
    latency("TPOT", declared.TPOT, "(E2E - TTFT) / (output tokens - 1), of a sequence."),
    latency("E2E", declared.E2E),
    latency("Queue", declared.QUEUE, "Submission to the first step."),
)
RUNNING = Panel(
    "Requests in the engine",
    (
        Query(gauge(declared.REQUESTS_RUNNING), "running"),
        Query(gauge(declared.REQUESTS_WAITING), "waiting"),
    ),
    "short",
)
KV_USED = Panel(
    "KV cache in use", one(gauge(declared.KV_USED, "max", "instance, engine"), "{{instance}} {{engine}}"), "percentunit"
)
PREEMPTIONS = Panel("Preemptions", one(rate(declared.PREEMPTIONS), "preemptions"), "ops")
HITS = Panel(
    "Prompt tokens found in the prefix cache",
    one(share(declared.PREFIX_CACHE_HITS, declared.PREFIX_CACHE_QUERIES), "found"),
    "percentunit",
)

OVERVIEW = Dashboard(
    "engine-overview",
    "engine: overview",
    (
        Row(
            "Now",
            (
                Panel("Requests", one(rate(declared.REQUESTS)), "reqps", "stat"),
                Panel("Prompt tokens a second", one(rate(declared.PROMPT_TOKENS)), "short", "stat"),
                Panel("Output tokens a second", one(rate(declared.GENERATION_TOKENS)), "short", "stat"),
                Panel("Engines", one(f"count({selected(declared.REQUESTS_RUNNING)})"), "short", "stat"),
                Panel("Unreachable", one(UNREACHABLE), "short", "stat", steps=((1, "red"),)),
                Panel("Failed", one(FAILED), "percentunit", "stat", steps=((0.001, "orange"), (0.01, "red"))),
                Panel("TTFT P95", one(quantile(0.95, declared.TTFT)), "s", "stat"),
                Panel("ITL P95", one(quantile(0.95, declared.ITL)), "s", "stat"),
                Panel("E2E P95", one(quantile(0.95, declared.E2E)), "s", "stat"),
                Panel("TTFT within $ttft_slo s", one(ATTAINED), "percentunit", "stat"),
                Panel("Waiting", one(gauge(declared.REQUESTS_WAITING)), "short", "stat"),
                Panel(
                    "KV cache", one(gauge(declared.KV_USED, "max")), "percentunit", "stat",
                    steps=((0.9, "red"),),
                ),
            ),
        ),
        Row("Latency", LATENCIES),
        Row("Saturation", (RUNNING, KV_USED, PREEMPTIONS)),
        Row(
            "Steps",
            (
                Panel(
                    "A step",
                    (
                        Query(mean(declared.STEP_DEVICE), "device"),
                        Query(mean(declared.STEP_HOST), "host"),
                        Query(mean(declared.STEP_GAP), "device idle before it"),
                    ),
                    "s",
                    says="Means. With overlap the host works while the device does.",
                ),
                Panel("Requests in a step", quantiles(declared.STEP_REQUESTS), "short"),
                Panel("Tokens computed", split(declared.STEP_TOKENS), "short"),
            ),
        ),
    ),
    {"ttft_slo": TTFT_LIMITS},
)  # fmt: skip

REQUESTS = Dashboard(
    "engine-requests",
    "engine: requests",
    (
        Row(
            "What came of them",
            (
                Panel("Ended", split(declared.REQUESTS), "reqps"),
                Panel("Refused", split(declared.REJECTED), "reqps"),
                Panel("Aborted", one(share(declared.ABORTS, declared.REQUESTS), "of all that ended"), "percentunit"),
            ),
        ),
        Row(
            "Classes",
            (
                Panel("First token in time", split(declared.SLO_MET), "reqps"),
                Panel("First token late, or none", split(declared.SLO_MISSED), "reqps"),
                Panel("Refused", split(declared.SLO_REFUSED), "reqps"),
            ),
        ),
        Row(
            "Stored answers",
            (
                Panel("Looked up", split(declared.ANSWER_LOOKUPS), "reqps"),
                Panel("Audited", split(declared.ANSWER_AUDITS), "reqps"),
                Panel(
                    "False hits, 95 % interval",
                    one(gauge(declared.ANSWER_FALSE_RATIO, "max", "bound"), "{{bound}}"),
                    "percentunit",
                ),
                Panel(
                    "Suspended: too many false hits", one(gauge(declared.ANSWER_SUSPENDED, "max"), "suspended"), "short"
                ),
                Panel("Answers", one(gauge(declared.ANSWER_ENTRIES), "answers"), "short"),
                Panel("What they take", one(gauge(declared.ANSWER_BYTES), "bytes"), "bytes"),
            ),
        ),
        Row(
            "Batches",
            (
                Panel("Lines that ended", split(declared.BATCH_LINES), "reqps"),
                Panel("Lines to be answered", one(gauge(declared.BATCH_LINES_WAITING), "waiting"), "short"),
                Panel("Paused: the disk is full", one(gauge(declared.BATCHES_PAUSED, "max"), "paused"), "short"),
            ),
        ),
        Row(
            "Where their time goes",
            (
                Panel(
                    "Mean time of a request",
                    tuple(Query(mean(part), name) for name, part in PARTS),
                    "s",
                ),
                Panel("TTFT", one(rate(declared.TTFT.bucket, by="le"), "{{le}}"), "s", "heatmap"),
                Panel("E2E", one(rate(declared.E2E.bucket, by="le"), "{{le}}"), "s", "heatmap"),
                latency("Prefill", declared.PREFILL, "Of requests that ended with stop or length."),
                latency("Decode", declared.DECODE, "Of the same."),
                latency("Queue", declared.QUEUE, "Of all that ended."),
            ),
        ),
        Row(
            "What they are like",
            (
                Panel("Prompt tokens", one(share(declared.PROMPT_TOKENS, declared.REQUESTS), "mean"), "short"),
                Panel("Output tokens", one(share(declared.GENERATION_TOKENS, declared.REQUESTS), "mean"), "short"),
                HITS,
            ),
        ),
    ),
)

KV = Dashboard(
    "engine-kv",
    "engine: KV cache",
    (
        Row(
            "Use",
            (
                KV_USED,
                Panel(
                    "By group of layers",
                    one(
                        gauge(declared.KV_GROUP_USED, "max", "instance, engine, group"),
                        "{{instance}} {{engine}} {{group}}",
                    ),
                    "percentunit",
                ),
                RUNNING,
                PREEMPTIONS,
            ),
        ),
        Row(
            "Prefix cache",
            (
                HITS,
                Panel(
                    "Prompt tokens",
                    (
                        Query(rate(declared.PREFIX_CACHE_QUERIES), "looked up"),
                        Query(rate(declared.PREFIX_CACHE_HITS), "found"),
                    ),
                    "short",
                ),
                Panel(
                    "Prefill tokens computed for each prompt token",
                    one(
                        share(declared.STEP_TOKENS, declared.PROMPT_TOKENS, declared.STEP_TOKENS.selector("prefill")),
                        "computed",
                    ),
                    "short",
                    says="Below 1 by what the prefix cache found, above by what was preempted and computed again.",
                ),
            ),
        ),
    ),
)

DRAFTED, ACCEPTED = declared.DRAFTED_TOKENS, declared.ACCEPTED_TOKENS
ACCEPTED_AT = rate(declared.ACCEPTED_PER_POSITION, by=declared.ACCEPTED_PER_POSITION.label)
TRIED_AT = rate(declared.TRIED_PER_POSITION, by=declared.TRIED_PER_POSITION.label)

SPECULATION = Dashboard(
    "engine-speculation",
    "engine: speculation",
    (
        Row(
            "Drafts",
            (
                Panel("Accepted", one(share(ACCEPTED, DRAFTED), "of those drafted"), "percentunit"),
                Panel("Mean accepted length", one(f"1 + {share(ACCEPTED, declared.DRAFT_CHAINS)}", "tokens"), "short"),
                Panel(
                    "Accepted by position",
                    one(f"{ACCEPTED_AT} / {TRIED_AT}", "{{position}}"),
                    "percentunit",
                    says="Of the drafts whose predecessors were all accepted.",
                ),
                Panel(
                    "Draft tokens a second",
                    (Query(rate(DRAFTED), "drafted"), Query(rate(ACCEPTED), "accepted")),
                    "short",
                ),
                Panel("Drafts of a request and step", one(share(DRAFTED, declared.DRAFT_CHAINS), "tokens"), "short"),
            ),
        ),
        Row(
            "What they cost and bring",
            (
                Panel(
                    "Share of step time in the drafter",
                    one(share(declared.DRAFT_SECONDS, declared.STEP.sum), "drafter"),
                    "percentunit",
                ),
                latency("ITL", declared.ITL),
                Panel("Requests in a step", quantiles(declared.STEP_REQUESTS), "short"),
            ),
        ),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, REQUESTS, KV, SPECULATION)
