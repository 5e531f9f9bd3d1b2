"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.contracts.request import TokenLogprobs
from engine.service.detokenizer import TokenBytes
from engine.service.output import ShownToken

LOWEST = -9999.0
"""A logprob that stands for minus infinity, which JSON does not have."""


def chat_logprobs(tokens: Sequence[ShownToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """``choices[].logprobs`` of chat completions."""
    return {"content": [_chat_entry(token, token_bytes) for token in tokens], "refusal": None}


def completion_logprobs(
    tokens: Sequence[tuple[int, int, TokenLogprobs | None]], token_bytes: TokenBytes
) -> dict[str, Any]:
    """``choices[].logprobs`` of completions. ``tokens``: id, character offset, logprobs (``None``: the first)."""
    return {
        "tokens": [token_name(id_, token_bytes) for id_, _, _ in tokens],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for _, _, entry in tokens],
        "top_logprobs": [None if entry is None else _named_top(entry, token_bytes) for _, _, entry in tokens],
        "text_offset": [offset for _, offset, _ in tokens],
    }


def token_name(token: int, token_bytes: TokenBytes) -> str:
    """A token's text; pieces of a character are written as ``bytes:\\xf0\\x9f``."""
    data = token_bytes[token]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def _chat_entry(shown: ShownToken, token_bytes: TokenBytes) -> dict[str, Any]:
    entry = shown.logprobs
    top = entry.top if entry else ()
    return {
        **_chat_token(shown.token, entry.logprob if entry else math.nan, token_bytes),
        "top_logprobs": [_chat_token(token, logprob, token_bytes) for token, logprob in top],
    }


def _chat_token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes[token]
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def _named_top(entry: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    """The most likely tokens and the sampled one, best first."""
    named = {token_name(token, token_bytes): finite(logprob) for token, logprob in entry.top}
    named.setdefault(token_name(entry.token, token_bytes), finite(entry.logprob))
    return named
