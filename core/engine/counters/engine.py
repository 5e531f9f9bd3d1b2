"""The engine's counters, kept from its events."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.contracts.counters import Metric, Reading
from engine.contracts.events import (
    DEFAULT_ENGINE,
    BatchEvent,
    DroppedEvent,
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    StoredAnswersEvent,
    TokensEvent,
)
from engine.contracts.router import AnswerTally
from engine.counters import declared
from engine.counters.metrics import Histogram, Metrics, Scalar

FINISH_REASONS = ("stop", "length", "abort", "error")
STATUSES = ("400", "401", "403", "404", "408", "413", "429", "500", "502", "503", "other")


class EngineCounters:
    """One engine's counts of all metrics of :mod:`engine.counters.declared`. Fed and read by one thread, that of the
    event bus."""

    def __init__(self, max_draft_tokens: int, engine: str = DEFAULT_ENGINE, classes: Sequence[str] = ()) -> None:
        """``max_draft_tokens``: drafts of one request in one step that there are counters for. ``engine``: its id.
        ``classes``: those of requests."""
        self._engine, self._metrics = engine, Metrics()
        positions = [str(1 + at) for at in range(max_draft_tokens)]
        labels: dict[str, Sequence[str]] = {
            declared.KV_GROUP_USED.name: (),  # groups are the model's: they show with the first step
            declared.TRIED_PER_POSITION.name: positions,
            declared.ACCEPTED_PER_POSITION.name: positions,
            declared.REQUESTS.name: FINISH_REASONS,
            declared.STEP_TOKENS.name: ("prefill", "decode"),
            declared.REJECTED.name: STATUSES,
            **{metric.name: classes for metric in (declared.SLO_MET, declared.SLO_MISSED, declared.SLO_REFUSED)},
            declared.ANSWER_LOOKUPS.name: ("hit", "similar", "miss"),
            declared.ANSWER_AUDITS.name: ("agreed", "false"),
            declared.ANSWER_FALSE_RATIO.name: ("low", "high"),
            declared.BATCH_LINES.name: ("completed", "failed"),
        }
        self._histograms: dict[str, Histogram] = {}
        self._scalars: dict[str, Scalar] = {}
        for metric in declared.METRICS:
            if metric.kind == "histogram":
                self._histograms[metric.name] = self._metrics.histogram(metric)
            else:
                self._scalars[metric.name] = self._metrics.scalar(metric, labels.get(metric.name, ("",)))
        self._itl = self._histograms[declared.ITL.name]

    def readings(self) -> list[Reading]:
        return [replace(reading, engine=self._engine) for reading in self._metrics.readings()]

    def value(self, metric: Metric, value: str = "") -> float:
        """Of a counter or a gauge, for this value of its label."""
        return self._scalars[metric.name].values[value]

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TokensEvent():
                    self._itl.observe(event.itl_ms / 1e3, event.num_tokens)
                case StepEvent():
                    self._on_step(event)
                case FirstTokenEvent():
                    self._observe_ms(declared.TTFT, event.ttft_ms)
                case RequestEvent():
                    self._on_request(event)
                case PrefixCacheEvent():
                    self._add(declared.PREFIX_CACHE_QUERIES, event.queries)
                    self._add(declared.PREFIX_CACHE_HITS, event.hits)
                case RejectedEvent():
                    status = str(event.status)
                    self._add(declared.REJECTED, 1, status if status in STATUSES else "other")
                    if event.slo_class and event.status == 429:
                        self._add(declared.SLO_REFUSED, 1, event.slo_class)
                case StoredAnswersEvent():
                    self._on_stored_answers(event.tally)
                case BatchEvent():
                    self._add(declared.BATCH_LINES, event.completed, "completed")
                    self._add(declared.BATCH_LINES, event.failed, "failed")
                    self._set(declared.BATCH_LINES_WAITING, event.waiting)
                    self._set(declared.BATCHES_PAUSED, int(event.paused))
                case DroppedEvent():
                    self._add(declared.DROPPED_EVENTS, event.num_events)

    def _on_step(self, event: StepEvent) -> None:
        self._observe_ms(declared.STEP, event.duration_ms)
        self._observe_ms(declared.STEP_HOST, event.host_ms)
        self._observe_ms(declared.STEP_GAP, event.gap_ms)
        self._observe_ms(declared.STEP_DEVICE, event.device_ms)
        self._histograms[declared.STEP_REQUESTS.name].observe(event.num_requests)
        self._set(declared.KV_USED, event.kv_used)
        for group, used in event.kv_groups_used:
            self._set(declared.KV_GROUP_USED, used, group)
        self._set(declared.REQUESTS_RUNNING, event.running)
        self._set(declared.REQUESTS_WAITING, event.waiting)
        self._add(declared.DRAFTED_TOKENS, event.drafted)
        self._add(declared.ACCEPTED_TOKENS, event.accepted)
        self._add(declared.DRAFT_CHAINS, event.draft_chains)
        self._add(declared.DRAFT_SECONDS, event.draft_ms / 1e3)
        for metric, drafts in (
            (declared.TRIED_PER_POSITION, event.drafts_tried),
            (declared.ACCEPTED_PER_POSITION, event.drafts_accepted),
        ):
            for position, count in enumerate(drafts, start=1):
                self._add(metric, count, str(position))
        self._add(declared.PREEMPTIONS, event.preemptions)
        self._add(declared.STEP_TOKENS, event.num_prefill_tokens, "prefill")
        self._add(declared.STEP_TOKENS, event.num_decode_tokens, "decode")

    def _on_stored_answers(self, tally: AnswerTally) -> None:
        """It has counts since the start."""
        for outcome, count in (("hit", tally.hits), ("similar", tally.similar_hits), ("miss", tally.misses)):
            self._set(declared.ANSWER_LOOKUPS, count, outcome)
        self._set(declared.ANSWER_AUDITS, tally.audits - tally.false_hits, "agreed")
        self._set(declared.ANSWER_AUDITS, tally.false_hits, "false")
        for bound, ratio in zip(("low", "high"), tally.false_rate, strict=True):
            self._set(declared.ANSWER_FALSE_RATIO, ratio, bound)
        self._set(declared.ANSWER_ENTRIES, tally.entries)
        self._set(declared.ANSWER_BYTES, tally.bytes)
        self._set(declared.ANSWER_SUSPENDED, tally.suspended)

    def _on_request(self, event: RequestEvent) -> None:
        self._add(declared.REQUESTS, 1, event.finish_reason)
        if event.slo_class:
            self._on_class(event)
        self._add(declared.PROMPT_TOKENS, event.prompt_tokens)
        self._add(declared.GENERATION_TOKENS, event.output_tokens)
        # Of every ended sequence: leaving out those that gave up waiting would hide the worst waits.
        self._observe_ms(declared.QUEUE, event.queue_ms)
        if event.ttfo_ms:  # that of a sequence that ended before it answered is not known
            self._observe_ms(declared.TTFO, event.ttfo_ms)
        if event.finish_reason == "abort":
            self._add(declared.ABORTS, 1)
        if event.finish_reason not in ("stop", "length"):
            return
        self._observe_ms(declared.E2E, event.e2e_ms)
        self._observe_ms(declared.PREFILL, event.prefill_ms)
        self._observe_ms(declared.DECODE, event.decode_ms)
        if event.output_tokens > 1:
            self._observe_ms(declared.TPOT, event.tpot_ms)

    def _on_class(self, event: RequestEvent) -> None:
        """A client that went away before its first token was due has not been let down."""
        if 0.0 < event.ttft_ms <= event.ttft_target_ms:
            self._add(declared.SLO_MET, 1, event.slo_class)
        elif event.ttft_ms or event.finish_reason != "abort" or event.e2e_ms >= event.ttft_target_ms:
            self._add(declared.SLO_MISSED, 1, event.slo_class)

    def _observe_ms(self, metric: Metric, milliseconds: float) -> None:
        self._histograms[metric.name].observe(milliseconds / 1e3)

    def _add(self, metric: Metric, amount: float, value: str = "") -> None:
        self._scalars[metric.name].add(amount, value)

    def _set(self, metric: Metric, amount: float, value: str = "") -> None:
        self._scalars[metric.name].set(amount, value)
