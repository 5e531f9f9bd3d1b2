"""A whole block of drafts in one pass (after DFlash, z-lab, 2026).

The head reads ``[newest token, MASK, MASK, ...]``, every position attending to the whole block and to the text before
it, and fills all masks at once. Of the text it knows what the target knew: hidden states of several layers, fused into
one vector per token, from which each of its layers projects keys and values. These are all it keeps in the cache.

Checkpoints are those of DFlash: ``fc``, ``hidden_norm``, ``layers.N.*`` with norms of queries and keys, ``norm``;
embedding and vocabulary projection are the target's. A head may bring a projection to fewer tokens: ``lm_head`` with
``d2t`` as in EAGLE3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine.checkpoint.files import CheckpointError, clipped, read_json
from engine.checkpoint.tensors import open_checkpoint
from engine.checkpoint.values import Values
from engine.contracts.drafter import DraftEngine, DrafterKV, DraftRows, DraftTokens, TargetStep
from engine.contracts.graph import Builder, Graph, KVSpec
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearPart, LinearSpec, Norm, RopeFacts
from engine.contracts.provider import BuildContext
from engine_plugins.drafter.config import ParallelBlockConfig
from engine_plugins.drafter.shipped import find_checkpoint
from engine_plugins.drafter.vocabulary import target_ids


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What a checkpoint's ``config.json`` says."""

    path: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    rope: RopeFacts
    block_size: int
    """Tokens of a block, the newest one included."""
    mask_token: int
    aux_layers: tuple[int, ...]
    draft_vocab: int | None
    """Entries of its own projection; ``None``: the target's."""
    quantization: Mapping[str, Any] | None

    def layer(self, index: int) -> Graph:
        """One layer. Inputs: the residual, and the same normed: its first norm is the drafter's business."""
        b, dim, name = Builder(), self.head_dim, f"layers.{index}.self_attn"
        x, h = b.input(self.hidden_size), b.input(self.hidden_size)
        sizes = (("q", self.num_heads * dim), ("k", self.num_kv_heads * dim), ("v", self.num_kv_heads * dim))
        q_proj, k_proj, v_proj = (LinearPart(f"{name}.{part}_proj", size) for part, size in sizes)
        with b.layer(x):
            q, k, v = b.linear(h, q_proj, k_proj, v_proj, shard="out")
            q = b.rms_norm(q, f"{name}.q_norm", self.eps, size=dim)
            k = b.rms_norm(k, f"{name}.k_norm", self.eps, size=dim)
            q, k = b.rope(q, k, self.rope, dim)
            a = b.attention(q, k, v, dim)
            x = b.add(x, b.linear(a, LinearPart(f"{name}.o_proj", self.hidden_size), shard="in"))
            h, name = b.rms_norm(x, f"layers.{index}.post_attention_layernorm", self.eps), f"layers.{index}.mlp"
            gate_proj, up_proj = (LinearPart(f"{name}.{part}_proj", self.intermediate_size) for part in ("gate", "up"))
            gate, up = b.linear(h, gate_proj, up_proj, shard="out")
            down = LinearPart(f"{name}.down_proj", self.hidden_size)
            b.add(x, b.linear(b.gated(gate, up, "silu"), down, shard="in"))
        return b.graph()


def read_facts(folder: str, target: ModelFacts) -> BlockFacts:
    """The head in ``folder``, checked against the model it is to draft for. Raises ``ValueError``."""
    try:
        config = read_json(Path(folder) / "config.json")
        facts = _facts(folder, Values(config))
    except CheckpointError as error:
        raise ValueError(f"drafter.path={folder}: {error}") from error
    problems = []
    if config.get("rope_scaling"):
        problems.append(f"rope_scaling={clipped(config['rope_scaling'])}: only plain rotations are served")
    if "sliding_attention" in Values(config).texts("layer_types", "MAX_LAYERS"):
        problems.append("layer_types has sliding_attention: only full attention is served")
    if facts.hidden_size != target.hidden_size:
        problems.append(f"hidden_size={facts.hidden_size}, {target.name} has {target.hidden_size}")
    if not 0 <= facts.mask_token < target.vocab_size:
        problems.append(f"mask_token_id={facts.mask_token}, {target.name} has {target.vocab_size} tokens")
    if not facts.aux_layers or not all(0 <= aux_layer <= target.num_layers for aux_layer in facts.aux_layers):
        ids = [aux_layer - 1 for aux_layer in facts.aux_layers]
        problems.append(f"target_layer_ids={ids}, {target.name} has {target.num_layers} layers")
    if facts.block_size < 2:
        problems.append(f"block_size={facts.block_size}, expected at least 2")
    if problems:
        raise ValueError(f"drafter.path={folder}: {'; '.join(problems)}")
    return facts


def _facts(folder: str, config: Values) -> BlockFacts:
    own = config.section("dflash_config")
    for values, keys in ((config, ("block_size",)), (own, ("mask_token_id", "target_layer_ids"))):
        for key in keys:
            if not values.has(key):
                raise CheckpointError(f"config.json has no {key}, as DFlash heads have")
    hidden, heads = config.whole("hidden_size", "MAX_HIDDEN_SIZE"), config.whole("num_attention_heads", "MAX_HEADS")
    return BlockFacts(
        path=folder,
        hidden_size=hidden,
        num_layers=config.whole("num_hidden_layers", "MAX_LAYERS"),
        num_heads=heads,
        num_kv_heads=config.whole("num_key_value_heads", "MAX_HEADS", heads),
        head_dim=config.whole("head_dim", "MAX_HEAD_DIM", hidden // heads),
        intermediate_size=config.whole("intermediate_size", "MAX_INTERMEDIATE_SIZE"),
        eps=config.number("rms_norm_eps", "MAX_EPS", 1e-6),
        rope=RopeFacts(config.number("rope_theta", "MAX_ROPE_THETA", 10000.0, least=1)),
        block_size=config.whole("block_size", "MAX_LISTED"),
        mask_token=own.whole("mask_token_id", "MAX_VOCAB", least=0),
        aux_layers=tuple(i + 1 for i in own.wholes("target_layer_ids", "MAX_LISTED", largest="MAX_LAYERS")),
        draft_vocab=config.whole("draft_vocab_size", "MAX_VOCAB") if config.has("draft_vocab_size") else None,
        quantization=config.section("quantization_config").values or None,
    )


class ParallelBlockDrafter:
    """Blocks of a DFlash head."""

    placement: Literal["host", "device"] = "device"
    capturable = True
    kv_lookahead = 0

    def __init__(self, config: ParallelBlockConfig, context: BuildContext) -> None:
        facts = read_facts(find_checkpoint("parallel_block", config.path, context), context.model)
        self._facts = facts
        self._model = replace(context.model, path=facts.path, quantization=facts.quantization)
        self.max_width = min(config.max_width, facts.block_size - 1)
        self.aux_layers = facts.aux_layers
        self.kv: DrafterKV | None = DrafterKV((KVSpec(facts.num_kv_heads, facts.head_dim),) * facts.num_layers)
        self.weights_bytes = open_checkpoint(facts.path).num_bytes_as(context.dtype)

    def start(self, engine: DraftEngine) -> None:
        facts, weights = self._facts, engine.open(self._model)
        size, eps = facts.hidden_size, facts.eps
        self._engine = engine
        self._fc = weights.linear(LinearSpec((LinearPart("fc", size),), len(facts.aux_layers) * size))
        self._fused_norm = weights.norm(Norm("rms", "hidden_norm", size, eps))
        layers = range(facts.num_layers)
        self._layers = [weights.layers(facts.layer(i), first=i) for i in layers]
        self._norms = [weights.norm(Norm("rms", f"layers.{i}.input_layernorm", size, eps)) for i in layers]
        self._final_norm = weights.norm(Norm("rms", "norm", size, eps))
        self._lm_head, self._to_target = engine.lm_head, None
        if facts.draft_vocab is not None:
            part = LinearPart("lm_head", facts.draft_vocab)
            self._lm_head = weights.linear(LinearSpec((part,), size, "out", "head"))
            found = target_ids(weights, facts.draft_vocab, self._model.vocab_size, facts.path)
            self._to_target = found.to(engine.device)
        weights.finish(ignored=("t2d", "rotary_emb.inv_freq"))
        self._sync, self._fill = engine.captured(self._write), engine.captured(self._filled)

    def extend(self, step: TargetStep) -> None:
        self._sync(*step.aux_hidden_states, metadata=step.metadata)

    def _write(self, *aux: Tensor, metadata: Any) -> None:
        """Keys and values of what the target's hidden states are fused to."""
        fused: Tensor = self._fused_norm(self._fc(self._engine.cat(aux)))
        for layer in self._layers:
            layer.write(fused, metadata)

    def propose(self, rows: DraftRows) -> DraftTokens:
        if not rows.index:
            return DraftTokens(rows.tokens[:, None])
        num_tokens = rows.most_draft_tokens + 1
        tokens = torch.full((len(rows.index), num_tokens), self._facts.mask_token, device=self._engine.device)
        tokens[:, 0] = rows.tokens
        logits: Tensor = self._fill(tokens.flatten(), metadata=self._engine.block_metadata(rows, num_tokens))
        masked = logits.view(len(rows.index), num_tokens, -1)[:, 1:].flatten(0, 1)
        return DraftTokens(self._engine.choose(masked, rows, self._to_target))

    def _filled(self, tokens: Tensor, metadata: Any) -> Tensor:
        """Logits of the token at every position of the blocks."""
        residual = self._engine.embed(tokens)
        for norm, layer in zip(self._norms, self._layers, strict=True):
            residual = layer.run(residual, norm(residual), metadata=metadata)
        logits: Tensor = self._lm_head(self._final_norm(residual))
        return logits

    def release(self, row_id: int) -> None:
        """Nothing is kept beside the cache."""
