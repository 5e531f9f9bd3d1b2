"""Every metric of an engine. Definitions: ``docs/metrics.md``."""

from __future__ import annotations

from engine.contracts.counters import Metric

SECONDS = (
    *(0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075),
    *(0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.006, 0.007, 0.008, 0.009),
    *(0.01, 0.0125, 0.015, 0.0175, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
"""Bounds of every time histogram: 0.1 ms to 60 s, 0.5 ms apart where token latencies of fast engines lie."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


def _seconds(name: str, help: str) -> Metric:
    return Metric("histogram", f"engine_{name}_seconds", "s", help, bounds=SECONDS)


TTFT = _seconds("ttft", "Arrival at the server to the first token leaving for the client.")
TTFO = _seconds("ttfo", "Arrival at the server to the first text or call that is no thought, per sequence with one.")
ITL = _seconds("itl", "Time between consecutive output tokens, one observation per token.")
TPOT = _seconds("tpot", "(e2e - ttft) / (output tokens - 1), per completed sequence.")
E2E = _seconds("e2e", "Arrival at the server to the last token, per completed sequence.")
QUEUE = _seconds("queue", "Submission to its first step, per ended sequence.")
PREFILL = _seconds("prefill", "Start of its first step to its first token, per completed sequence.")
DECODE = _seconds("decode", "First to last output token, per completed sequence.")
STEP = _seconds("step", "Planning of a step until its results are known to the host.")
STEP_HOST = _seconds("step_host", "Planning and committing a step on the host.")
STEP_GAP = _seconds("step_gap", "Device idle before a step although requests were running.")
STEP_DEVICE = _seconds("step_device", "Forward, sample and verify of a step.")
STEP_REQUESTS = Metric("histogram", "engine_step_requests", "requests", "Requests in a step.", bounds=SIZES)
KV_USED = Metric("gauge", "engine_kv_used_ratio", "1", "Leased KV blocks / all of the fullest KV group, latest step.")
KV_GROUP_USED = Metric("gauge", "engine_kv_group_used_ratio", "1", "The same of each KV group.", "group")
REQUESTS_RUNNING = Metric("gauge", "engine_requests_running", "requests", "Requests that hold a row, latest step.")
REQUESTS_WAITING = Metric("gauge", "engine_requests_waiting", "requests", "Requests not admitted yet, latest step.")
PREFIX_CACHE_QUERIES = Metric("counter", "engine_prefix_cache_queries_total", "tokens", "Prompt tokens looked up.")
PREFIX_CACHE_HITS = Metric(
    "counter", "engine_prefix_cache_hits_total", "tokens", "Prompt tokens found in the prefix cache."
)
DRAFTED_TOKENS = Metric("counter", "engine_drafted_tokens_total", "tokens", "Draft tokens verified.")
ACCEPTED_TOKENS = Metric("counter", "engine_accepted_tokens_total", "tokens", "Draft tokens accepted.")
DRAFT_CHAINS = Metric("counter", "engine_draft_chains_total", "chains", "Drafts of one request in one step, verified.")
TRIED_PER_POSITION = Metric(
    "counter",
    "engine_draft_tokens_tried_per_position_total",
    "tokens",
    "Drafts whose predecessors were all accepted.",
    "position",
)
ACCEPTED_PER_POSITION = Metric(
    "counter",
    "engine_draft_tokens_accepted_per_position_total",
    "tokens",
    "Those of them that were accepted.",
    "position",
)
DRAFT_SECONDS = Metric("counter", "engine_draft_seconds_total", "s", "Time in a drafter on the device.")
PREEMPTIONS = Metric("counter", "engine_preemptions_total", "requests", "Requests that lost their KV blocks.")
ABORTS = Metric("counter", "engine_aborts_total", "sequences", "Sequences aborted.")
REQUESTS = Metric("counter", "engine_requests_total", "sequences", "Sequences ended.", "finish_reason")
PROMPT_TOKENS = Metric("counter", "engine_prompt_tokens_total", "tokens", "Prompt tokens of ended sequences.")
GENERATION_TOKENS = Metric("counter", "engine_generation_tokens_total", "tokens", "Output tokens of ended sequences.")
STEP_TOKENS = Metric("counter", "engine_step_tokens_total", "tokens", "Tokens computed in steps.", "kind")
REJECTED = Metric("counter", "engine_rejected_total", "requests", "Requests refused before the engine.", "status")
SLO_MET = Metric("counter", "engine_slo_met_total", "sequences", "First token in time for its class.", "class")
SLO_MISSED = Metric("counter", "engine_slo_missed_total", "sequences", "First token late, or none.", "class")
SLO_REFUSED = Metric("counter", "engine_slo_refused_total", "requests", "Requests of the class answered 429.", "class")
ANSWER_LOOKUPS = Metric(
    "counter", "engine_answer_cache_lookups_total", "requests", "Requests looked up among stored answers.", "outcome"
)
ANSWER_AUDITS = Metric(
    "counter",
    "engine_answer_cache_audits_total",
    "requests",
    "Similar hits that an engine answered, too.",
    "outcome",
)
ANSWER_FALSE_RATIO = Metric(
    "gauge", "engine_answer_cache_false_hit_ratio", "1", "95 % interval of false audits / all.", "bound"
)
ANSWER_ENTRIES = Metric("gauge", "engine_answer_cache_entries", "answers", "Answers stored.")
ANSWER_BYTES = Metric("gauge", "engine_answer_cache_bytes", "bytes", "What they take.")
ANSWER_SUSPENDED = Metric("gauge", "engine_answer_cache_suspended", "1", "1: similar questions are no longer answered.")
BATCH_LINES = Metric("counter", "engine_batch_lines_total", "requests", "Lines of batches that ended.", "outcome")
BATCH_LINES_WAITING = Metric("gauge", "engine_batch_lines_waiting", "requests", "Lines of batches to be answered.")
BATCHES_PAUSED = Metric("gauge", "engine_batches_paused", "1", "1 while batches wait for room on the disk.")
DROPPED_EVENTS = Metric("counter", "engine_dropped_events_total", "events", "Events that no exporter saw.")
METRICS = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric))
"""All metrics, in the order of pages and documentation."""
