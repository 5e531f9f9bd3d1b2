"""Token ids that share what the prompts of a trace shared."""

from __future__ import annotations

from engine.simulation.trace import TraceRequest

FIRST_OUTPUT = 1 << 31
"""Ids from here on are output tokens; smaller ones stand for blocks of prompts."""
NUM_TOKENS = 1 << 32


class Prompts:
    """Each block of a trace is one token id, repeated; what no block hash names is an id of its own."""

    def __init__(self) -> None:
        self._token_of: dict[int, int] = {}
        self._next = 0

    def tokens(self, request: TraceRequest) -> tuple[int, ...]:
        """``prompt_tokens`` ids. Prompts begin alike as far as their block hashes do."""
        tokens: list[int] = []
        for name in request.block_hashes:
            token = self._token_of.get(name)
            if token is None:
                token = self._token_of[name] = self._new()
            tokens += [token] * request.block_tokens
        missing = request.prompt_tokens - len(tokens)
        if missing > 0:
            tokens += [self._new()] * missing
        return tuple(tokens[: request.prompt_tokens])

    def _new(self) -> int:
        self._next += 1
        return self._next
