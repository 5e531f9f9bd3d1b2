"""Slot ``drafter``: what might come next?

A drafter proposes chains of tokens. The core verifies them, samples so that the output distribution is exactly
the target model's, applies stops, commits, and chooses the width (0 included) from measured acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrafterKV:
    """Keys and values a drafter keeps, as extra layers on the target's block ids.

    ``num_layers`` own layers of the given head shape, or ``num_layers=0`` and ``shared_layers=L`` to read the
    target's first ``L`` layers.
    """

    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    shared_layers: int = 0


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One request that wants drafts."""

    slot: int
    """Its row in the device tables."""
    tokens: Sequence[int]
    """All its tokens so far, prompt included (``placement == "host"``; empty for device drafters)."""
    prompt_len: int
    width: int
    """At most this many tokens are wanted (>= 1)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposals for a batch of rows, in the order of the rows.

    ``tokens[i]`` has at most ``rows[i].width`` ids; fewer (or none) when the drafter has nothing to say.
    ``probs``: proposal probabilities ``[num_rows, width, vocab]`` float32, when the drafter samples; ``None``
    when each proposed token was certain (greedy or looked up).
    """

    tokens: tuple[tuple[int, ...], ...]
    probs: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """The plugin."""

    placement: Literal["host", "device"]
    """``host``: reads tokens on the CPU, so the next step waits for this one's tokens (the plan prints that).
    ``device``: runs behind the target's forward pass on the device."""
    taps: tuple[int, ...]
    """Hidden states wanted: tap ``i`` is the residual entering layer ``i``; ``num_layers`` is before the final norm."""
    kv: DrafterKV | None
    kv_lookahead: int
    """> 0: draft keys at ``i`` depend on token ``i + kv_lookahead``, so a prefix hit gives up its last block."""
    max_width: int
    """Most tokens it can propose; 0 switches speculation off."""
    returns_probs: bool

    def extend(self, slots: Sequence[int], tokens: Tensor, next_tokens: Tensor, taps: Sequence[Tensor]) -> None:
        """Called after every target forward pass, prefill chunks and width 0 included.

        ``tokens``/``next_tokens``: int64 ``[num_tokens]``, the tokens computed and those that follow them;
        ``taps[i]``: ``[num_tokens, hidden_size]``. Drafters without state do nothing here.
        """
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Propose continuations."""
        ...

    def release(self, slot: int) -> None:
        """The request in this slot is gone; forget what was kept for it."""
        ...
