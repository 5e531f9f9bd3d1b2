"""Arguments of offline generation, checked before they reach the engine, which trusts what it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.contracts.constraint import CallsGrammar, Grammar
from engine.contracts.request import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, ReasoningTokens, SamplingParams

Count = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-1e6, le=1e6)]
MOST_SHOWN = 80
"""Characters of a grammar in an error."""
_Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
_JSON_KINDS: dict[str, Any] = {"json_schema": dict[str, Any] | bool, "choice": _Choices, "calls": CallsGrammar}
"""Of what JSON the text of a grammar is."""


class _Ranges(msgspec.Struct, forbid_unknown_fields=True):
    """The types and ranges of :class:`SamplingParams`, wider than the API's where that is harmless."""

    max_tokens: Count = 16
    min_tokens: Count = 0
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """0: only the most likely token."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 and -1: no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: int | None = None
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: dict[int, Finite] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    grammar: Grammar | None = None
    reasoning: ReasoningTokens | None = None


def checked_sampling(sampling: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """The engine's parameters. Raises ``TypeError`` or ``ValueError`` naming the argument."""
    for name, value in sampling.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: expected a finite number")
    try:
        known = msgspec.convert(dict(sampling), _Ranges)
    except msgspec.ValidationError as error:
        raise _named(str(error), sampling) from None
    if known.grammar is not None:
        _check_grammar(known.grammar)
    params = SamplingParams(**msgspec.structs.asdict(known))
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        checked_tokens(tuple(ids), vocab_size, name)
        most = MAX_BIASED_TOKENS if name == "logit_bias" else MAX_STOP_TOKENS // 2
        if len(ids) > most:
            raise ValueError(f"{name} names {len(ids)} tokens: expected at most {most}")
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens}: expected at most max_tokens={params.max_tokens}")
    return msgspec.structs.replace(
        params,
        top_p=max(params.top_p, 1e-9),
        top_k=max(params.top_k, 0),
        # Any integer is a seed; the engine takes 63 bits.
        seed=None if params.seed is None else params.seed & (2**63 - 1),
    )


def _check_grammar(grammar: Grammar) -> None:
    """Raises ``ValueError`` for one that was built of other values than it has."""
    try:
        msgspec.convert(msgspec.structs.asdict(grammar), Grammar)
        checked_text(grammar.text, "text")
        if (kind := _JSON_KINDS.get(grammar.kind)) is not None:
            msgspec.json.decode(grammar.text, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"grammar={str(grammar)[:MOST_SHOWN]}: {error}") from None


def checked_tokens(tokens: Sequence[int], vocab_size: int, where: str) -> tuple[int, ...]:
    """Raises ``TypeError`` or ``ValueError`` naming the first thing that is not a token id."""
    if not isinstance(tokens, Sequence) and not hasattr(tokens, "__iter__"):
        raise TypeError(f"{where}={tokens!r}: expected text or token ids")
    ids = tuple(tokens)
    for token in ids:
        if not hasattr(token, "__index__") or isinstance(token, bool):
            raise TypeError(f"{where}: {token!r} is not a token id")
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})")
    return tuple(int(token) for token in ids)


def checked_text(text: str, where: str) -> str:
    """Raises ``ValueError`` for text that is not Unicode: lone surrogates have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not Unicode text ({error.reason} at {error.start})") from None
    return text


def checked_stops(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings; one string is one of them. Raises ``ValueError``."""
    if not hasattr(stop, "__iter__"):
        raise ValueError(f"stop={stop!r}: expected text, or a list of texts")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop: {text!r}: expected text of at least one character")
    return stops


def check_queueing(priority: int, cache_salt: str) -> None:
    """Raises ``TypeError`` naming the argument."""
    for name, value, kind, expected in (
        ("priority", priority, int, "a whole number, lower ones run first"),
        ("cache_salt", cache_salt, str, "text"),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected {expected}")
    checked_text(cache_salt, "cache_salt")


def _named(message: str, sampling: Mapping[str, Any]) -> Exception:
    """msgspec says what is wrong ``at `$.name` ``; the user wants ``name=value``."""
    text, _, at = message.partition(" - at `$.")
    name = at.rstrip("`").partition("[")[0]
    if name in sampling:
        return ValueError(f"{name}={sampling[name]!r}: {text[:1].lower()}{text[1:]}")
    return TypeError(text)
