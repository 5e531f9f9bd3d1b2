"""The dashboards: overview, requests, KV cache, speculation."""

from __future__ import annotations

from engine.counters import declared
from engine_lab.dashboards.model import Dashboard, Panel, Query, Row
from engine_lab.dashboards.queries import gauge, mean, quantile, quantiles, rate, selected, share

ENDED = declared.FINISHED.name
PROMPT, OUTPUT = declared.PROMPT.name, declared.GENERATION.name
TTFT, ITL, E2E = declared.TTFT.name, declared.ITL.name, declared.E2E.name
ATTAINED = share(f"{TTFT}_bucket", f"{TTFT}_count", 'le="$ttft_slo"')
FAILED = share(ENDED, ENDED, 'finish_reason="error"')
UNREACHABLE = 'count(up{job=~"$job",instance=~"$instance"} == 0) or vector(0)'
TTFT_LIMITS = ("0.5", "0.1", "0.2", "1.0", "2.0", "30.0")
"""Bounds of buckets, as Prometheus writes them."""


def one(promql: str, legend: str = "") -> tuple[Query, ...]:
    return (Query(promql, legend),)


def latency(title: str, histogram: str, says: str = "") -> Panel:
    return Panel(title, quantiles(histogram), "s", says=says)


LATENCIES = (
    latency("TTFT", TTFT, "Arrival at the server to the first token leaving for the client."),
    latency("ITL", ITL, "Between two output tokens."),
    latency("TPOT", declared.TPOT.name, "(E2E - TTFT) / (output tokens - 1), of a sequence."),
    latency("E2E", E2E),
    latency("Queue", declared.QUEUE.name, "Submission to the first step."),
)
RUNNING = Panel(
    "Requests in the engine",
    (
        Query(gauge(declared.RUNNING.name), "running"),
        Query(gauge(declared.WAITING.name), "waiting"),
    ),
    "short",
)
KV_USED = Panel("KV cache in use", one(gauge(declared.KV_USED.name, "max", "instance"), "{{instance}}"), "percentunit")
PREEMPTIONS = Panel("Preemptions", one(rate(declared.PREEMPTIONS.name), "preemptions"), "ops")
HITS = Panel(
    "Prompt tokens found in the prefix cache",
    one(share(declared.HITS.name, declared.QUERIES.name), "found"),
    "percentunit",
)

OVERVIEW = Dashboard(
    "engine-overview",
    "engine: overview",
    (
        Row(
            "Now",
            (
                Panel("Requests", one(rate(ENDED)), "reqps", "stat"),
                Panel("Prompt tokens a second", one(rate(PROMPT)), "short", "stat"),
                Panel("Output tokens a second", one(rate(OUTPUT)), "short", "stat"),
                Panel("Engines", one(f"count({selected(declared.RUNNING.name)})"), "short", "stat"),
                Panel("Unreachable", one(UNREACHABLE), "short", "stat", steps=((1, "red"),)),
                Panel("Failed", one(FAILED), "percentunit", "stat", steps=((0.001, "orange"), (0.01, "red"))),
                Panel("TTFT P95", one(quantile(0.95, TTFT)), "s", "stat"),
                Panel("ITL P95", one(quantile(0.95, ITL)), "s", "stat"),
                Panel("E2E P95", one(quantile(0.95, E2E)), "s", "stat"),
                Panel("TTFT within $ttft_slo s", one(ATTAINED), "percentunit", "stat"),
                Panel("Waiting", one(gauge(declared.WAITING.name)), "short", "stat"),
                Panel(
                    "KV cache", one(gauge(declared.KV_USED.name, "max")), "percentunit", "stat",
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
                        Query(mean(declared.STEP_DEVICE.name), "device"),
                        Query(mean(declared.STEP_HOST.name), "host"),
                        Query(mean(declared.STEP_GAP.name), "device idle before it"),
                    ),
                    "s",
                    says="Means. With overlap the host works while the device does.",
                ),
                Panel("Requests in a step", quantiles(declared.STEP_REQUESTS.name), "short"),
                Panel("Tokens computed", one(rate(declared.STEP_TOKENS.name, by="kind"), "{{kind}}"), "short"),
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
                Panel("Ended", one(rate(ENDED, by="finish_reason"), "{{finish_reason}}"), "reqps"),
                Panel("Refused", one(rate(declared.REJECTED.name, by="status"), "{{status}}"), "reqps"),
                Panel("Aborted", one(share(declared.ABORTS.name, ENDED), "of all that ended"), "percentunit"),
            ),
        ),
        Row(
            "Where their time goes",
            (
                Panel(
                    "Mean time of a request",
                    tuple(Query(mean(f"engine_{name}_seconds"), name) for name in ("queue", "prefill", "decode")),
                    "s",
                ),
                Panel("TTFT", one(rate(f"{TTFT}_bucket", by="le"), "{{le}}"), "s", "heatmap"),
                Panel("E2E", one(rate(f"{E2E}_bucket", by="le"), "{{le}}"), "s", "heatmap"),
                latency("Prefill", declared.PREFILL.name, "Of requests that ended with stop or length."),
                latency("Decode", declared.DECODE.name, "Of the same."),
                latency("Queue", declared.QUEUE.name, "Of all that ended."),
            ),
        ),
        Row(
            "What they are like",
            (
                Panel("Prompt tokens", one(share(PROMPT, ENDED), "mean"), "short"),
                Panel("Output tokens", one(share(OUTPUT, ENDED), "mean"), "short"),
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
                    one(gauge(declared.KV_GROUP_USED.name, "max", "instance, group"), "{{instance}} {{group}}"),
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
                        Query(rate(declared.QUERIES.name), "looked up"),
                        Query(rate(declared.HITS.name), "found"),
                    ),
                    "short",
                ),
                Panel(
                    "Prefill tokens computed for each prompt token",
                    one(share(declared.STEP_TOKENS.name, PROMPT, 'kind="prefill"'), "computed"),
                    "short",
                    says="Below 1 by what the prefix cache found, above by what was preempted and computed again.",
                ),
            ),
        ),
    ),
)

DRAFTED, ACCEPTED, CHAINS = (
    f"engine_{name}_total" for name in ("drafted_tokens", "accepted_tokens", "draft_chains")
)  # fmt: skip
TRIED_AT, ACCEPTED_AT = declared.TRIED.name, declared.ACCEPTED_AT.name

SPECULATION = Dashboard(
    "engine-speculation",
    "engine: speculation",
    (
        Row(
            "Drafts",
            (
                Panel("Accepted", one(share(ACCEPTED, DRAFTED), "of those drafted"), "percentunit"),
                Panel("Mean accepted length", one(f"1 + {share(ACCEPTED, CHAINS)}", "tokens"), "short"),
                Panel(
                    "Accepted by position",
                    one(f"{rate(ACCEPTED_AT, by='position')} / {rate(TRIED_AT, by='position')}", "{{position}}"),
                    "percentunit",
                    says="Of the drafts whose predecessors were all accepted.",
                ),
                Panel(
                    "Draft tokens a second", (Query(rate(DRAFTED), "drafted"), Query(rate(ACCEPTED), "accepted")),
                    "short",
                ),
                Panel("Drafts of a request and step", one(share(DRAFTED, CHAINS), "tokens"), "short"),
            ),
        ),
        Row(
            "What they cost and bring",
            (
                Panel(
                    "Share of step time in the drafter",
                    one(share(declared.DRAFTING.name, f"{declared.STEP.name}_sum"), "drafter"),
                    "percentunit",
                ),
                latency("ITL", ITL),
                Panel("Requests in a step", quantiles(declared.STEP_REQUESTS.name), "short"),
            ),
        ),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, REQUESTS, KV, SPECULATION)
