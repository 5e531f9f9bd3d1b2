"""The names under which vLLM publishes its metrics, so that dashboards, autoscalers and gateways made for it
work.

Buckets, labels and types are the ones those consumers expect. Where vLLM's definition differs from the
engine's own metric of the same kind, ``docs/metrics.md`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.contracts.counters import Metric
from engine.contracts.events import (
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RequestEvent,
    StepEvent,
    TokensEvent,
)
from engine.counters.metrics import Histogram, Metrics, Scalar

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
FINISH_REASONS = ("stop", "length", "abort", "error")


CACHE_CONFIG = Metric("gauge", "vllm:cache_config_info", "", "KV cache settings.")


def cache_config(block_size: int, kv_tokens: float) -> Mapping[str, str]:
    """The labels of :data:`CACHE_CONFIG`, as pickers of endpoints read them."""
    return {"block_size": str(block_size), "num_gpu_blocks": str(int(kv_tokens) // block_size)}


class VllmMetrics:
    """``vllm:*``."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self.readings = self._metrics.readings
        gauge, counter = self._gauge, self._counter
        self.running = gauge("vllm:num_requests_running", "Requests in execution.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting to be admitted.")
        self.kv_used = gauge("vllm:kv_cache_usage_perc", "KV cache usage, 1 means full.")
        self.preemptions = counter("vllm:num_preemptions_total", "Preemptions.")
        self.prompt = counter("vllm:prompt_tokens_total", "Prompt tokens processed.")
        self.generation = counter("vllm:generation_tokens_total", "Tokens generated.")
        self.success = counter("vllm:request_success_total", "Requests ended.", "finished_reason", FINISH_REASONS)
        self.queries = counter("vllm:prefix_cache_queries_total", "Prefix cache lookups, in tokens.")
        self.hits = counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens.")
        self.drafted = counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens.")
        self._histograms()

    def _gauge(self, name: str, help: str, label: str = "", values: Sequence[str] = ("",)) -> Scalar:
        return self._metrics.scalar(Metric("gauge", name, "", help, label), values)

    def _counter(self, name: str, help: str, label: str = "", values: Sequence[str] = ("",)) -> Scalar:
        return self._metrics.scalar(Metric("counter", name, "", help, label), values)

    def _histograms(self) -> None:
        def histogram(name: str, bounds: tuple[float, ...]) -> Histogram:
            help = f"{name.replace('_', ' ').capitalize()}."
            return self._metrics.histogram(Metric("histogram", f"vllm:{name}", "", help, bounds=bounds))

        self.ttft = histogram("time_to_first_token_seconds", TTFT)
        self.itl = histogram("inter_token_latency_seconds", ITL)
        self.tpot = histogram("request_time_per_output_token_seconds", ITL)
        self.e2e = histogram("e2e_request_latency_seconds", REQUEST)
        self.queue = histogram("request_queue_time_seconds", REQUEST)
        self.inference = histogram("request_inference_time_seconds", REQUEST)
        self.prefill = histogram("request_prefill_time_seconds", REQUEST)
        self.decode = histogram("request_decode_time_seconds", REQUEST)
        self.request_prompt = histogram("request_prompt_tokens", REQUEST_TOKENS)
        self.request_generation = histogram("request_generation_tokens", REQUEST_TOKENS)
        self.request_max = histogram("request_params_max_tokens", REQUEST_TOKENS)
        self.step_tokens = histogram("iteration_tokens_total", STEP_TOKENS)

    def on(self, event: Event) -> None:
        match event:
            case TokensEvent():
                self.itl.observe(event.itl_ms / 1e3, event.num_tokens)
            case FirstTokenEvent():
                self.ttft.observe(event.ttft_ms / 1e3)
            case StepEvent():
                self._on_step(event)
            case PrefixCacheEvent():
                self.queries.add(event.queries)
                self.hits.add(event.hits)
            case RequestEvent():
                self._on_request(event)
            case _:
                pass  # vLLM has no metric for the others

    def _on_step(self, event: StepEvent) -> None:
        self.running.set(event.running)
        self.waiting.set(event.waiting)
        self.kv_used.set(event.kv_used)
        self.preemptions.add(event.preemptions)
        self.drafted.add(event.drafted)
        self.accepted.add(event.accepted)
        self.step_tokens.observe(event.num_prefill_tokens + event.num_decode_tokens)

    def _on_request(self, event: RequestEvent) -> None:
        self.success.add(1, event.finish_reason)
        self.prompt.add(event.prompt_tokens)
        self.generation.add(event.output_tokens)
        self.queue.observe(event.queue_ms / 1e3)
        if event.finish_reason not in ("stop", "length"):
            return
        self.e2e.observe(event.e2e_ms / 1e3)
        self.prefill.observe(event.prefill_ms / 1e3)
        self.decode.observe(event.decode_ms / 1e3)
        self.inference.observe((event.prefill_ms + event.decode_ms) / 1e3)
        self.request_prompt.observe(event.prompt_tokens)
        self.request_generation.observe(event.output_tokens)
        if event.max_tokens:
            self.request_max.observe(event.max_tokens)
        if event.output_tokens > 1:
            self.tpot.observe(event.tpot_ms / 1e3)
