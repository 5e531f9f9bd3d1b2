"""Drafting with an EAGLE3 head.

At position ``t`` the head reads the embedding of token ``t + 1`` beside a hidden state ``g`` that stands for the text
up to ``t``, and predicts token ``t + 2``. Where the target has been, ``g`` is made of three of its hidden states;
further ahead it is the head's own output one position earlier. Keys at ``t`` depend on token ``t + 1``, so
``kv_lookahead`` is 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.drafter import (
    DraftEngine,
    DrafterKV,
    DraftLayers,
    DraftRows,
    DraftTokens,
    DraftWeights,
    TargetStep,
)
from engine.contracts.graph import KVSpec
from engine.contracts.ops import LinearPart, LinearSpec, Norm
from engine.contracts.provider import BuildContext
from engine_plugins.drafter.config import Eagle3Config
from engine_plugins.drafter.eagle3.checkpoint import NUM_AUX, Eagle3Facts, read_facts
from engine_plugins.drafter.shipped import find_checkpoint
from engine_plugins.drafter.vocabulary import target_ids


class Eagle3Drafter:
    """Chains of an EAGLE3 head."""

    placement: Literal["host", "device"] = "device"
    capturable = True
    kv_lookahead = 1

    def __init__(self, config: Eagle3Config, context: BuildContext) -> None:
        self.max_width = config.max_width
        facts = read_facts(find_checkpoint("eagle3", config.path, context), context.model)
        self._facts = facts
        self._model = replace(context.model, path=facts.path, quantization=facts.quantization)
        self.aux_layers = facts.aux_layers
        self.kv: DrafterKV | None = DrafterKV((KVSpec(facts.num_kv_heads, facts.head_dim),) * facts.num_layers)
        self.weights_bytes = open_checkpoint(facts.path).num_bytes_as(context.dtype)
        self._hidden = torch.empty(0)
        """After the last layer, for every token of the last step."""

    def start(self, engine: DraftEngine) -> None:
        head = Eagle3Head(self._facts, self._model.vocab_size, engine.open(self._model), engine)
        self._sync = engine.captured(head.sync)
        self._sync_keys = engine.captured(head.sync_keys)
        self._chain = engine.chain(head.next, first=head.logits, ids=head.ids)

    def extend(self, step: TargetStep) -> None:
        if step.drafts_follow or self._facts.num_layers > 1:  # what layers after the first keep is made of its output
            self._hidden = self._sync(step.next_tokens, *step.aux_hidden_states, metadata=step.metadata)
        else:
            self._sync_keys(step.next_tokens, *step.aux_hidden_states, metadata=step.metadata)

    def propose(self, rows: DraftRows) -> DraftTokens:
        return self._chain(rows, self._hidden)

    def release(self, row_id: int) -> None:
        """Nothing is kept beside the cache."""


class Eagle3Head:
    """The computation itself. Hidden states are ``[num_tokens, hidden_size]``."""

    def __init__(self, facts: Eagle3Facts, target_vocab: int, weights: DraftWeights, engine: DraftEngine) -> None:
        size, target_size, eps = facts.hidden_size, facts.hidden_size, facts.eps
        self._engine, embed = engine, engine.embed
        if "embed_tokens.weight" in weights.names:
            embed = weights.embedding("embed_tokens", self._vocabulary(weights), size)
        self._fc = weights.linear(LinearSpec((LinearPart("fc", size),), NUM_AUX * target_size))
        self._norms_before: list[Any] = []
        if facts.fc_norm:
            self._norms_before = [weights.norm(Norm("rms", f"fc_norm.{i}", target_size, eps)) for i in range(NUM_AUX)]
        before = Norm("rms", "input_norm", NUM_AUX * size, eps)
        self._norm_before = weights.norm(before) if facts.norm_before_fc else None
        of_embedding, of_g = (
            Norm("rms", f"{facts.prefix}.{of}", size, eps) for of in ("input_layernorm", "hidden_norm")
        )
        self._read = weights.norms((of_embedding, of_g), embed)
        """``(next_tokens, g) ->`` what queries, keys and values are made of, ``[num_tokens, 2 * hidden_size]``, and the
        normed ``g``."""
        self._residual_is_normed = facts.norm_before_residual
        graph = facts.graph()
        self._layers: DraftLayers = weights.layers(graph)
        self.logits = weights.head(graph)
        """``hidden -> [num_tokens, draft_vocab]`` float32."""
        self._final_norm = weights.norm(facts.final_norm) if facts.norm_output else None
        self.ids: Tensor | None = None
        """The target's token of each entry of the draft vocabulary."""
        if "d2t" in weights.names:
            self.ids = target_ids(weights, facts.draft_vocab, target_vocab, facts.path).to(engine.device)
        weights.finish(ignored=("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight"))

    def fuse(self, aux: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states -> ``g``."""
        if self._norms_before:
            aux = tuple(norm(hidden) for norm, hidden in zip(self._norms_before, aux, strict=True))
        together = self._engine.cat(aux)
        fused: Tensor = self._fc(together if self._norm_before is None else self._norm_before(together))
        return fused

    def sync(self, next_tokens: Tensor, *aux: Tensor, metadata: Any) -> Tensor:
        """Draft KV sync of tokens that the target has computed."""
        return self.run(next_tokens, self.fuse(aux), metadata)

    def sync_keys(self, next_tokens: Tensor, *aux: Tensor, metadata: Any) -> None:
        """The same where nobody drafts after: the keys and values of the first layer alone."""
        read, _ = self._read(next_tokens, self.fuse(aux))
        self._layers.write(read, metadata)

    def next(self, tokens: Tensor, hidden: Tensor | None, metadata: Any) -> tuple[Tensor, Tensor]:
        """One step of a chain."""
        assert hidden is not None
        hidden = self.run(tokens, self.next_hidden(hidden), metadata)
        return self.logits(hidden), hidden

    def run(self, next_tokens: Tensor, g: Tensor, metadata: Any) -> Tensor:
        """The layers: what the head knows at each position, and the ``g`` of the next. Overwrites ``g``."""
        read, normed = self._read(next_tokens, g)
        return self._layers.run(normed if self._residual_is_normed else g, read, metadata=metadata)

    def next_hidden(self, hidden: Tensor) -> Tensor:
        """The ``g`` of the next position."""
        following: Tensor = hidden if self._final_norm is None else self._final_norm(hidden)
        return following

    @staticmethod
    def _vocabulary(weights: DraftWeights) -> int:
        return int(weights.tensor("embed_tokens.weight").shape[0])
