"""What happens in the engine, as typed events with one monotonic clock. Exporters receive them in batches.

``engine`` of an event is the id of the engine that it is of. Events without it are the server's: they are counted for
its first engine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.contracts.request import FinishReason, StagedTokens
from engine.contracts.router import AnswerTally

DEFAULT_ENGINE = "default"
"""The id of the engine of a server that has one."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens of one sequence that a step computes."""

    request_id: str
    num_tokens: int
    context: int
    """Tokens before them, whose keys and values are there."""


MAX_CHUNKS = 16
"""Most chunks that a :class:`StepEvent` names: the largest."""


class StepEvent(msgspec.Struct, frozen=True, tag="step"):
    """One step of the loop."""

    at_s: float
    step: int
    duration_ms: float
    """From planning until the results are known to the host."""
    host_ms: float
    """Planning and committing this step on the host (with overlap it runs while the device works)."""
    device_ms: float
    """Forward, sample and verify."""
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    running: int
    waiting: int
    kv_used: float
    """Leased blocks / all blocks, 0..1 (blocks that only the prefix cache holds count as free), of the KV group with
    least left."""
    drafted: int = 0
    accepted: int = 0
    num_draft_tokens: int = 0
    preemptions: int = 0
    gap_ms: float = 0.0
    """How long the device had nothing to do before this step although requests were running."""
    draft_chains: int = 0
    """Requests of which drafts were verified: ``1 + accepted / draft_chains`` is the mean accepted length."""
    draft_ms: float = 0.0
    """Time of the drafter: on the device after this step, for draft KV sync and proposing; on the host before it."""
    drafts_tried: tuple[int, ...] = ()
    """By position in a chain, from its first draft on: drafts whose predecessors were all accepted."""
    drafts_accepted: tuple[int, ...] = ()
    """Drafts of ``drafts_tried`` that were accepted. The sum is ``accepted``."""
    kv_groups_used: tuple[tuple[str, float], ...] = ()
    """The same as ``kv_used`` of each KV group, by name (``full``, ``window_4096``)."""
    decode_context: int = 0
    """Tokens whose keys and values the requests that decode read, added up."""
    prefill_context: int = 0
    """For each prompt token of the step, the tokens it attends to, added up."""
    chunks: tuple[Chunk, ...] = ()
    """Whose prompt tokens the step computes; at most :data:`MAX_CHUNKS`, the largest first."""
    captured: bool = False
    """The step was replayed from a capture (a CUDA graph), not launched kernel by kernel."""
    engine: str = DEFAULT_ENGINE


class AdmittedEvent(msgspec.Struct, frozen=True, tag="admitted"):
    """A waiting sequence was given a row and KV blocks: its first step is planned."""

    at_s: float
    request_id: str
    waited_ms: float
    """Time since it was submitted, or preempted."""
    cached_tokens: int
    """Tokens whose keys and values the prefix cache had."""
    preemptions: int = 0
    """How often it was preempted before."""
    engine: str = DEFAULT_ENGINE


class PreemptedEvent(msgspec.Struct, frozen=True, tag="preempted"):
    """A running sequence lost its row and KV blocks: its tokens will be computed again."""

    at_s: float
    request_id: str
    lost_tokens: int
    """Computed tokens whose keys and values are gone."""
    by: str = ""
    """The sequence that needed its blocks."""
    engine: str = DEFAULT_ENGINE


class PrefixCacheEvent(msgspec.Struct, frozen=True, tag="prefix_cache"):
    """A sequence was admitted for the first time: how many of its prompt tokens were already cached."""

    at_s: float
    queries: int
    """Prompt tokens looked up."""
    hits: int
    """Prompt tokens found."""
    request_id: str = ""
    engine: str = DEFAULT_ENGINE


class FirstTokenEvent(msgspec.Struct, frozen=True, tag="first_token"):
    """The first token of a sequence left for the client."""

    at_s: float
    request_id: str
    ttft_ms: float
    """From arrival at the server, tokenizing and queueing included."""
    engine: str = DEFAULT_ENGINE
    expected_ms: float = 0.0
    """What ``ttft_ms`` was expected to be when the sequence was sent to the engine; 0: too little was known."""
    slo_class: str = ""
    """Its class of ``slo.classes``; empty: there are none."""


class TokensEvent(msgspec.Struct, frozen=True, tag="tokens"):
    """Later tokens of a sequence left for the client."""

    at_s: float
    request_id: str
    num_tokens: int
    itl_ms: float
    """Time since the previous output of this sequence, divided by ``num_tokens``."""
    engine: str = DEFAULT_ENGINE
    slo_class: str = ""
    """Its class of ``slo.classes``; empty: there are none."""


class RequestParameters(msgspec.Struct, frozen=True):
    """What a client asked for, as far as it is no text."""

    kind: str
    """As :attr:`engine.contracts.router.ApiRequest.kind`."""
    stream: bool
    num_choices: int
    """Choices of each prompt."""
    temperature: float
    top_p: float
    top_k: int
    """0: no limit."""
    seed: int | None = None


class RequestEvent(msgspec.Struct, frozen=True, tag="request"):
    """A sequence ended. Times in milliseconds. ``receive + tokenize + route + dispatch + queue + prefill + decode +
    deliver + unattributed == e2e``, one after the other in this order."""

    at_s: float
    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    e2e_ms: float
    ttft_ms: float
    tpot_ms: float
    """(e2e - ttft) / (output_tokens - 1); 0 when there is one token or none."""
    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    unattributed_ms: float
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    max_tokens: int = 0
    decode_steps: int = 0
    """Steps that brought its tokens after the first."""
    draft_chains: int = 0
    """Steps of ``decode_steps`` in which drafts were verified."""
    draft_ms: float = 0.0
    """The drafter's part of ``decode_ms``; all requests of a step wait for it together."""
    receive_ms: float = 0.0
    """Reading and parsing the body."""
    route_ms: float = 0.0
    """Checking parameters and asking the router."""
    dispatch_ms: float = 0.0
    """On the way to the engine process."""
    deliver_ms: float = 0.0
    """From the last token in the engine until it was ready for the client."""
    detokenize_ms: float = 0.0
    """Making text of tokens, while the engine goes on."""
    write_ms: float = 0.0
    """Waiting for the client to take a stream, while the engine goes on."""
    last_write_ms: float = 0.0
    """The part of ``write_ms`` after ``e2e_ms``."""
    unread_ms: float = 0.0
    """That the client's receive buffer was full while more was ready for it, as the kernel counts it; 0 where it does
    not."""
    traceparent: str = ""
    """The client's, if it sent a valid one (W3C Trace Context)."""
    span_id: str = ""
    """The request's span here, in the client's trace; empty without one, and for further sequences of a request."""
    parameters: RequestParameters | None = None
    engine: str = DEFAULT_ENGINE
    ttfo_ms: float = 0.0
    """Until the first text or call that is no thought; 0: there was none."""
    attempts: int = 1
    """Engines that were sent the sequence, until ``engine`` began with it: what it spent at those before is part of
    ``route_ms``."""
    slo_class: str = ""
    """Its class of ``slo.classes``; empty: there are none."""
    ttft_target_ms: float = 0.0
    """That of its class."""
    expected_ttft_ms: float = 0.0
    """What ``ttft_ms`` was expected to be when the sequence was sent to ``engine``; 0: too little was known."""
    loaded: dict[str, int] = {}
    """Of ``cached_tokens``: from KV stores, by name."""
    staged: StagedTokens | None = None
    """Records that it waited for, as a part of ``queue_ms``."""


class ProxiedEvent(msgspec.Struct, frozen=True, tag="proxied"):
    """A request was passed on to another server, and its answer back to the client."""

    at_s: float
    request_id: str
    kind: str
    """As :attr:`engine.contracts.router.ApiRequest.kind`."""
    server: str
    """The other server: ``HOST:PORT``, or a gateway's name of a provider."""
    status: int
    """Status of the answer; 499: the client went away."""
    total_ms: float
    """Since the request came in."""
    traceparent: str = ""
    """The client's, if it sent a valid one."""
    span_id: str = ""
    """The span of the request here, which the other server is told as its parent."""
    first_ms: float = 0.0
    """Until the first byte of a gateway's answer; 0: it had none."""
    attempts: int = 1
    """Servers that the request was sent to, one after the other: ``server`` is the last."""
    model: str = ""
    """The model that it was sent to last, as a gateway knows it."""
    expected_ms: float = 0.0
    """When a gateway expected the first byte after it sent the request to that server; 0: it could not know."""
    cost: float = 0.0
    """Of a provider's answer, in the currency of its prices; 0: it has no price, or said no usage."""
    name: str = ""
    """What the client called the model, as a gateway knows it: perhaps a name that stands for several."""
    model_reason: str = ""
    """Why a gateway tried the first of several models first."""


class OwnRequestEvent(msgspec.Struct, frozen=True, tag="own_request"):
    """What became of a request that a gateway sent for itself, or meant to: no client got its answer."""

    at_s: float
    request_id: str
    """Of the client's request that it belongs to."""
    purpose: Literal["look", "shadow"]
    """A look at the beginning of a model's answer, or the largest model's answer for comparison."""
    result: str
    """Of a look: ``confident``, ``unsure``, ``no_logprobs`` or ``failed``. Of a shadow: ``agrees``, ``differs``,
    ``failed`` or ``dropped``, since no target was idle."""
    name: str
    """What the client called the model."""
    model: str
    """The smaller model, which is looked at or compared."""
    server: str = ""
    """Where it was sent, as :attr:`ProxiedEvent.server`; empty: nowhere."""
    cost: float = 0.0
    """As :attr:`ProxiedEvent.cost`."""


class RejectedEvent(msgspec.Struct, frozen=True, tag="rejected"):
    """A request was refused before it reached an engine: the one whose model the server offers."""

    at_s: float
    status: int
    reason: str
    engine: str = DEFAULT_ENGINE
    slo_class: str = ""
    """The class that it was of, where that was known."""


class StoredAnswersEvent(msgspec.Struct, frozen=True, tag="stored_answers"):
    """What came of stored answers since the start."""

    at_s: float
    tally: AnswerTally


class BatchEvent(msgspec.Struct, frozen=True, tag="batch"):
    """Lines of batches were answered, or batches paused or went on."""

    at_s: float
    completed: int
    """Lines that were answered since the last such event."""
    failed: int
    """Those of them that an error answers: not part of ``completed``."""
    waiting: int
    """Lines of all batches that are to be answered."""
    paused: bool
    """Nothing goes on: the disk is full."""
    engine: str = DEFAULT_ENGINE


class DroppedEvent(msgspec.Struct, frozen=True, tag="dropped"):
    """Events no exporter saw, because the bounded queue in front of the exporters was full."""

    at_s: float
    num_events: int


Event = (
    StepEvent
    | AdmittedEvent
    | PreemptedEvent
    | PrefixCacheEvent
    | FirstTokenEvent
    | TokensEvent
    | RequestEvent
    | ProxiedEvent
    | OwnRequestEvent
    | RejectedEvent
    | StoredAnswersEvent
    | BatchEvent
    | DroppedEvent
)
"""Every event an exporter can receive."""
