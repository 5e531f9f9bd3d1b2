"""A model that computes in exact integers, for testing everything around a model.

Its "keys and values" are the token ids themselves, and the next token is a hash of every token the cache shows
through the block table. A block given to two requests, a position written twice, a stale or never written entry:
any of them changes the output, and :func:`expected_output` says what it should have been. No weights, no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.kernels.context import ForwardBatch, prepared_of
from engine.kernels.torch.reference import most_likely

ECHO = 5
"""Most tokens repeat the one this many positions earlier."""

_MODULUS = 1_000_003


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """The model: what follows these tokens. Mostly an echo, so that lookup drafters have something to find."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % _MODULUS
    if len(tokens) >= ECHO and state % 8:
        return tokens[-ECHO]
    return state % vocab_size


def expected_output(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Greedy continuation of a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


class ExactKV:
    """Token ids by block and offset; -1 where nothing was written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tokens = torch.full((num_blocks, block_size), -1, dtype=torch.int64)

    def copy_block(self, group: int, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]


class ExactModel:
    """Stands in for :class:`engine.kernels.model.LoweredModel`."""

    lowering = ("exact integers",)
    weights_bytes = 0
    on_triton = False
    layers = layers_of_each_kind = ()

    def __init__(self, vocab_size: int, fail_on_token: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.fail_on_token = fail_on_token
        """A batch that contains this token raises, as a kernel might."""
        self.num_forwards = 0

    @property
    def attention(self) -> ExactModel:
        return self

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(self, batch: ForwardBatch, kv: ExactKV, aux_layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """``hidden`` is float64 ``[T, 1]``: the next token's id."""
        return self.run(batch, kv, prepared_of(self, batch.attention), aux_layers)

    def run(
        self, batch: ForwardBatch, kv: ExactKV, prepared: tuple[AttentionBatch, ...], aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """As a captured step must, looks at the batch's tensors only: ``q_lens`` and ``kv_lens`` may be bounds."""
        self.num_forwards += 1
        ids = batch.token_ids
        if self.fail_on_token is not None and bool((ids == self.fail_on_token).any()):
            raise RuntimeError(f"token {self.fail_on_token} in the batch")
        assert bool((ids >= 0).all()), "an input token was read before anybody wrote it"
        kv.tokens.view(-1)[batch.slot_mappings[0]] = ids
        followers: list[int] = []
        (step,) = prepared
        q_starts, kv_lens = step.q_starts.tolist(), step.kv_lens_device.tolist()
        for row, kv_len in enumerate(kv_lens):
            q_len = q_starts[row + 1] - q_starts[row]
            blocks = step.block_tables[row].to(torch.int64)
            seen = kv.tokens[blocks].reshape(-1)[:kv_len].tolist()
            assert min(seen) >= 0, "a key was read before anybody wrote it"
            followers += [next_token(seen[: kv_len - q_len + j + 1], self.vocab_size) for j in range(q_len)]
        hidden = torch.tensor(followers, dtype=torch.float64)[:, None]
        return hidden, [hidden for _ in aux_layers]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits: 8 for the next token, a gentle slope for the others."""
        logits = torch.linspace(0.0, 1.0, self.vocab_size).repeat(hidden.shape[0], 1)
        return logits.scatter(1, hidden.to(torch.int64), 8.0)

    def greedy(self, hidden: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and the most likely tokens."""
        logits = self.head(hidden)
        logits = logits if out is None else out.copy_(logits)
        return logits, most_likely(logits)
