"""A request for tokens and what comes back, as they travel between the API process and the engine process.

These are msgspec structs: typed, immutable, encoded as msgpack. Nothing here is ever pickled.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.contracts.constraint import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_BIASED_TOKENS = 1024
"""Most entries of :attr:`SamplingParams.logit_bias`."""
MAX_STOP_TOKENS = 256
"""Most tokens that end an output: :attr:`SamplingParams.stop_token_ids` and the model's own."""


class ReasoningTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens between which an output thinks before it answers: there a grammar does not hold."""

    closes: int
    """Ends the thought."""
    opens: int | None = None
    """Begins one, as the first token of an output. ``None``: the prompt ends within a thought."""
    budget: int | None = None
    """Most tokens of it: then ``closes`` is the only one that may come."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How output tokens are chosen. Validated by the API; the engine trusts it."""

    max_tokens: int = 16
    """0 computes the prompt and generates nothing (for prompt logprobs)."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """64-bit. ``None``: the engine draws one, so that every request has a seed (and is told which)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """Ends the output when sampled (the model's own end tokens are added unless ``ignore_eos``)."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """``None``: no logprobs. ``k``: the sampled token's logprob and the ``k`` most likely ones (k may be 0)."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens (``echo`` with logprobs). Turns prefix-cache hits off for this request."""
    grammar: Grammar | None = None
    """What the output must look like. The model's end tokens end it, ``ignore_eos`` or not."""
    reasoning: ReasoningTokens | None = None
    """Where the output thinks, if a grammar begins after that or the thought has a budget."""


Retained = tuple[int, float]
"""So many leading tokens, for so many seconds after their last use."""


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to extend. ``n > 1`` and prompt lists are fanned out by the API before this point."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one, all within the vocabulary."""
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Smaller runs earlier."""
    cache_salt: str = ""
    """Separates prefix-cache entries of tenants: requests share cached blocks only with equal salts."""
    client: str = ""
    """Who sent it: clients that wait take turns."""
    group: str = ""
    """The API request it belongs to, if that has several sequences: no group holds all rows."""
    ttft_ms: float = 0.0
    """Its first token should come so long after its arrival at the engine; 0: there is no such target. Either all
    requests of an engine have one, or none has."""
    itl_ms: float = 0.0
    """While it decodes, steps should take no longer than this; 0: ``scheduler.itl_target_ms``."""
    prefilled: bool = False
    """Another engine has just computed the prompt: stores may hear of it a moment later."""
    retain: tuple[Retained, ...] = ()
    """Beginnings of the prompt that are to stay in the prefix cache, as far as there is room."""
    output: tuple[int, ...] = ()
    """What another engine has generated of it: the output goes on after these tokens, and they count as its own."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, after penalties and before temperature and truncation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """``(token id, logprob)`` of the most likely tokens, best first."""


class StagedTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a sequence waited for: records from a KV store that is not memory."""

    store: str
    num_tokens: int
    """Prompt tokens that came of it; 0: they were late, or gone."""
    ms: float
    """How long it waited, which is part of its time in the queue."""
    compute_ms: float
    """What computing them would have taken by the measured cost of steps; 0: not known."""


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a sequence's time went inside the engine process. Milliseconds from one monotonic clock.

    ``queue + prefill + decode`` is the time from submission to the last token.
    """

    submitted_s: float = 0.0
    """When the engine got it; 0: it never did."""
    queue_ms: float = 0.0
    """Submission until the first step that computes one of its tokens."""
    prefill_ms: float = 0.0
    """That step's start until the first output token."""
    decode_ms: float = 0.0
    """First output token until the last."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    loaded: dict[str, int] = {}
    """Of these: from KV stores, by name."""
    staged: StagedTokens | None = None
    retained_tokens: int = 0
    """Prompt tokens whose keys and values stay longer than others, see :attr:`EngineRequest.retain`."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    """Steps that brought its tokens after the first."""
    draft_chains: int = 0
    """Those of them in which drafts were verified."""
    draft_ms: float = 0.0
    """Of ``decode_ms``: time in the drafter, which all requests of a step wait for together."""

    @property
    def loaded_tokens(self) -> int:
        """Of ``cached_tokens``: from all KV stores."""
        return sum(self.loaded.values())


class TokensOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sequence after one step. The last one of a sequence has ``finish_reason``."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """With the first token, when asked for: one per prompt token, the first is ``None``."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The stop token that ended the output, if one did. It is also the last of ``tokens`` (it was generated and
    counts as such), but it is not part of the visible text."""
    error: str = ""
    timings: Timings | None = None
    """On the last one."""
    at_s: float = 0.0
    """Monotonic clock when the tokens were known, in seconds."""
    cached_tokens: int = 0
    """With the first token; as in :class:`Timings`. So is the next one."""
    retained_tokens: int = 0
