"""What layers cache of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Reach(NamedTuple):
    """Which cached tokens a query sees; caches that are read alike are one KV group. See
    :class:`engine.contracts.kv_allocator.KVGroup`."""

    kind: Literal["full", "window", "chunked", "state"] = "full"
    tokens: int | None = None
    """Of a window, or of a chunk."""


EVERY_TOKEN = Reach()


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Which tokens one of several ranks caches: the ``index``-th of ``ranks`` equal stretches of every KV block."""

    ranks: int
    index: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer caches of a token: a key and a value for each head."""

    num_kv_heads: int
    head_dim: int
    reach: Reach = EVERY_TOKEN
    value_dim: int | None = None
    """Values are the first ``value_dim`` numbers of keys, and not stored again (latent attention)."""
    tokens: TokenShare | None = None
    """Of one rank; ``None``: all. All caches of a KV group have the same."""

    @property
    def ranks(self) -> int:
        """That share out its tokens."""
        return 1 if self.tokens is None else self.tokens.ranks

    @property
    def numbers(self) -> float:
        """Numbers that one token leaves: its key and, unless it is part of that, its value, of all heads; on average
        where ranks share out tokens."""
        return self.num_kv_heads * self.head_dim * (1 if self.value_dim is not None else 2) / self.ranks


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent op caches, in float32: ``token_size`` numbers of each token, and of each block the
    ``state_size`` numbers after its last token. A query reads what the tokens of its block and of the one before left,
    and the state after the block before."""

    token_size: int
    state_size: int = 0

    @property
    def reach(self) -> Reach:
        return Reach("state")


Cached = KVSpec | StateSpec
