"""Exporter ``prometheus``: histograms, gauges and counters at ``/metrics``. Definitions:
``docs/metrics.md``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from engine.contracts.events import (
    DroppedEvent,
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    TokensEvent,
)
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.exposition import Histogram, Page
from engine_plugins.exporter.vllm_names import VllmMetrics

SECONDS = (
    *(0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075),
    *(0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.006, 0.007, 0.008, 0.009),
    *(0.01, 0.0125, 0.015, 0.0175, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
"""Bounds of every time histogram: 0.1 ms to 60 s, 0.5 ms apart where token latencies of fast engines lie."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
FINISH_REASONS = ("stop", "length", "abort", "error")
STATUSES = ("400", "401", "403", "404", "408", "413", "429", "500", "502", "503", "other")


class Observer(Protocol):
    page: Page

    def on(self, event: Event) -> None: ...


class EngineMetrics:
    """The engine's own names, ``engine_*``."""

    def __init__(self, model: str, max_draft_tokens: int) -> None:
        """``max_draft_tokens``: drafts of one request in one step that there are counters for."""
        page = self.page = Page({"model": model})
        seconds, counter, gauge = self._seconds, page.counter, page.gauge
        positions = ("position", [str(1 + at) for at in range(max_draft_tokens)])
        self.ttft = seconds("ttft", "Arrival at the server to the first token leaving for the client.")
        self.itl = seconds("itl", "Time between consecutive output tokens, one observation per token.")
        self.tpot = seconds("tpot", "(e2e - ttft) / (output tokens - 1), per completed sequence.")
        self.e2e = seconds("e2e", "Arrival at the server to the last token, per completed sequence.")
        self.queue = seconds("queue", "Submission to its first step, per ended sequence.")
        self.prefill = seconds("prefill", "Start of its first step to its first token, per completed sequence.")
        self.decode = seconds("decode", "First to last output token, per completed sequence.")
        self.step = seconds("step", "Planning of a step until its results are known to the host.")
        self.host = seconds("step_host", "Planning and committing a step on the host.")
        self.gap = seconds("step_gap", "Device idle before a step although requests were running.")
        self.device = seconds("step_device", "Forward, sample and verify of a step.")
        self.batch = page.histogram("engine_step_requests", "Requests in a step.", SIZES)
        self.kv_used = gauge("engine_kv_used_ratio", "Leased KV blocks / all of the fullest KV group, latest step.")
        # Groups are the model's: they show with the first step.
        self.kv_groups_used = gauge("engine_kv_group_used_ratio", "The same of each KV group.", "group", ())
        self.running = gauge("engine_requests_running", "Requests that hold a row, latest step.")
        self.waiting = gauge("engine_requests_waiting", "Requests not admitted yet, latest step.")
        self.queries = counter("engine_prefix_cache_queries_total", "Prompt tokens looked up.")
        self.hits = counter("engine_prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.drafted = counter("engine_drafted_tokens_total", "Draft tokens verified.")
        self.accepted = counter("engine_accepted_tokens_total", "Draft tokens accepted.")
        self.chains = counter("engine_draft_chains_total", "Drafts of one request in one step, verified.")
        self.tried = counter(
            "engine_draft_tokens_tried_per_position_total", "Drafts whose predecessors were all accepted.", *positions
        )
        self.accepted_at = counter(
            "engine_draft_tokens_accepted_per_position_total", "Those of them that were accepted.", *positions
        )
        self.drafting = counter("engine_draft_seconds_total", "Time in a drafter on the device.")
        self.preemptions = counter("engine_preemptions_total", "Requests that lost their KV blocks.")
        self.aborts = counter("engine_aborts_total", "Sequences aborted.")
        self.finished = counter("engine_requests_total", "Sequences ended.", "finish_reason", FINISH_REASONS)
        self.prompt = counter("engine_prompt_tokens_total", "Prompt tokens of ended sequences.")
        self.generation = counter("engine_generation_tokens_total", "Output tokens of ended sequences.")
        self.computed = counter("engine_step_tokens_total", "Tokens computed in steps.", "kind", ("prefill", "decode"))
        self.rejected = counter("engine_rejected_total", "Requests refused before the engine.", "status", STATUSES)
        self.dropped = counter("engine_dropped_events_total", "Events that no exporter saw.")

    def _seconds(self, name: str, help: str) -> Histogram:
        return self.page.histogram(f"engine_{name}_seconds", help, SECONDS)

    def on(self, event: Event) -> None:
        match event:
            case TokensEvent():
                self.itl.observe(event.itl_ms / 1e3, event.num_tokens)
            case StepEvent():
                self._on_step(event)
            case FirstTokenEvent():
                self.ttft.observe(event.ttft_ms / 1e3)
            case RequestEvent():
                self._on_request(event)
            case PrefixCacheEvent():
                self.queries.add(event.queries)
                self.hits.add(event.hits)
            case RejectedEvent():
                status = str(event.status)
                self.rejected.add(1, status if status in STATUSES else "other")
            case DroppedEvent():
                self.dropped.add(event.num_events)

    def _on_step(self, event: StepEvent) -> None:
        self.step.observe(event.duration_ms / 1e3)
        self.host.observe(event.host_ms / 1e3)
        self.gap.observe(event.gap_ms / 1e3)
        self.device.observe(event.device_ms / 1e3)
        self.batch.observe(event.num_requests)
        self.kv_used.set(event.kv_used)
        for group, used in event.kv_groups_used:
            self.kv_groups_used.set(used, group)
        self.running.set(event.running)
        self.waiting.set(event.waiting)
        self.drafted.add(event.drafted)
        self.accepted.add(event.accepted)
        self.chains.add(event.draft_chains)
        self.drafting.add(event.draft_ms / 1e3)
        for counter, drafts in ((self.tried, event.drafts_tried), (self.accepted_at, event.drafts_accepted)):
            for position, count in enumerate(drafts, start=1):
                counter.add(count, str(position))
        self.preemptions.add(event.preemptions)
        self.computed.add(event.num_prefill_tokens, "prefill")
        self.computed.add(event.num_decode_tokens, "decode")

    def _on_request(self, event: RequestEvent) -> None:
        self.finished.add(1, event.finish_reason)
        self.prompt.add(event.prompt_tokens)
        self.generation.add(event.output_tokens)
        # Of every ended sequence: leaving out those that gave up waiting would hide the worst waits.
        self.queue.observe(event.queue_ms / 1e3)
        if event.finish_reason == "abort":
            self.aborts.add(1)
        if event.finish_reason not in ("stop", "length"):
            return
        self.e2e.observe(event.e2e_ms / 1e3)
        self.prefill.observe(event.prefill_ms / 1e3)
        self.decode.observe(event.decode_ms / 1e3)
        if event.output_tokens > 1:
            self.tpot.observe(event.tpot_ms / 1e3)


class PrometheusExporter:
    """The plugin: a :class:`~engine.contracts.exporter.ScrapedExporter`."""

    def __init__(self, config: PrometheusConfig, context: BuildContext) -> None:
        self._observers: list[Observer] = [EngineMetrics(context.model.name, context.max_draft_tokens)]
        if config.compat == "vllm":
            self._observers.append(VllmMetrics(context.model.name, context.block_size))
        # A scrape may come from another thread than the batches.
        self._lock = threading.Lock()

    def export(self, events: Sequence[Event]) -> None:
        with self._lock:
            for event in events:
                for observer in self._observers:
                    observer.on(event)

    def render(self) -> str:
        with self._lock:
            return "".join(observer.page.render() for observer in self._observers)

    def close(self) -> None:
        """Nothing is buffered."""
