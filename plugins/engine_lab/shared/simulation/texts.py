"""Token ids that share what the texts of a trace shared."""

from __future__ import annotations

from engine_lab.shared.simulation.trace import TraceRequest

NUM_TOKENS = 1 << 32
"""Ids are below: as many as a block key can tell apart."""


class Texts:
    """Each block of a trace is one token id, repeated; what no block hash names is an id of its own."""

    def __init__(self) -> None:
        self._token_of: dict[int, int] = {}
        self._next = 0

    def of(self, request: TraceRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and output. Two texts begin alike as far as their block hashes do."""
        tokens: list[int] = []
        for name in request.block_hashes:
            token = self._token_of.get(name)
            if token is None:
                token = self._token_of[name] = self._new()
            tokens += [token] * request.block_tokens
        for end in (request.prompt_tokens, request.prompt_tokens + request.output_tokens):
            if len(tokens) < end:
                tokens += [self._new()] * (end - len(tokens))
        end = request.prompt_tokens
        return tuple(tokens[:end]), tuple(tokens[end : end + request.output_tokens])

    def _new(self) -> int:
        self._next += 1
        return self._next
