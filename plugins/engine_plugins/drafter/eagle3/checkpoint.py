"""EAGLE3 checkpoints as they are published: what their ``config.json`` says, and how their tensors are named.

Two layouts. That of the paper's authors and SpecForge is a Llama configuration with ``draft_vocab_size`` and tensors
``midlayer.*``; that of speculators nests the layer's configuration in ``transformer_layer_config`` and names tensors
``layers.N.*``. They also count the aux layers differently: the former names the layers whose *output* is taken, the
latter those whose input is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.files import CheckpointError, read_json
from engine.checkpoint.rope import read_rope
from engine.checkpoint.values import Values
from engine.contracts.graph import Builder, Graph, Value
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearPart, Norm, RopeFacts

NUM_AUX = 3
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Facts:
    """A head, whatever its layout."""

    path: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab: int
    eps: float
    rope: RopeFacts
    bias: bool
    """Of the q/k/v projections."""
    qk_norm: bool
    aux_layers: tuple[int, ...]
    prefix: str
    """Of the first layer's tensors."""
    norm_before_residual: bool
    """The residual is the normed hidden state."""
    norm_before_fc: bool
    """One norm over all aux hidden states together."""
    fc_norm: bool
    """One norm for each aux hidden state (EAGLE 3.1)."""
    norm_output: bool
    """The next step is handed the hidden state after the final norm (EAGLE 3.1)."""
    quantization: Mapping[str, Any] | None

    def graph(self) -> Graph:
        """The layers and the head. Inputs: the residual, and what queries, keys and values of the first layer are made
        of, which is normed already and twice as wide."""
        b = Builder()
        x, read = b.input(self.hidden_size), b.input(2 * self.hidden_size)
        for index in range(self.num_layers):
            name = self.prefix if index == 0 else f"layers.{index}"
            with b.layer(x):
                h = read if index == 0 else b.rms_norm(x, f"{name}.input_layernorm", self.eps)
                x = b.add(x, self._attention(b, h, f"{name}.self_attn"))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", self.eps)
                x = b.add(x, self._mlp(b, h, f"{name}.mlp"))
        b.lm_head(b.rms_norm(x, "norm", self.eps), "lm_head", self.draft_vocab)
        return b.graph()

    def _attention(self, b: Builder, h: Value, name: str) -> Value:
        dim = self.head_dim
        sizes = (("q", self.num_heads * dim), ("k", self.num_kv_heads * dim), ("v", self.num_kv_heads * dim))
        q_proj, k_proj, v_proj = (LinearPart(f"{name}.{part}_proj", size, self.bias) for part, size in sizes)
        q, k, v = b.linear(h, q_proj, k_proj, v_proj, shard="out")
        if self.qk_norm:
            q = b.rms_norm(q, f"{name}.q_norm", self.eps, size=dim)
            k = b.rms_norm(k, f"{name}.k_norm", self.eps, size=dim)
        q, k = b.rope(q, k, self.rope, dim)
        return b.linear(b.attention(q, k, v, dim), LinearPart(f"{name}.o_proj", self.hidden_size), shard="in")

    def _mlp(self, b: Builder, h: Value, name: str) -> Value:
        gate_proj, up_proj = (LinearPart(f"{name}.{part}_proj", self.intermediate_size) for part in ("gate", "up"))
        gate, up = b.linear(h, gate_proj, up_proj, shard="out")
        return b.linear(b.gated(gate, up, "silu"), LinearPart(f"{name}.down_proj", self.hidden_size), shard="in")

    @property
    def final_norm(self) -> Norm:
        return Norm("rms", "norm", self.hidden_size, self.eps)


def read_facts(folder: str, target: ModelFacts) -> Eagle3Facts:
    """The head in ``folder``, checked against the model it is to draft for. Raises ``ValueError``."""
    problems: list[str] = []
    try:
        facts = _Reader(folder, read_json(Path(folder) / "config.json"), target, problems).facts()
    except CheckpointError as error:
        raise ValueError(f"drafter.path={folder}: {error}") from error
    _check(facts, target, problems)
    if problems:
        raise ValueError(f"drafter.path={folder}: {'; '.join(problems)}")
    return facts


class _Reader:
    """One ``config.json``; what does not go with the target is added to ``problems``."""

    def __init__(self, folder: str, config: Mapping[str, Any], target: ModelFacts, problems: list[str]) -> None:
        self._folder = folder
        self._config = Values(config)
        self._by_speculators = self._config.has("transformer_layer_config")
        self._layer = self._config.section("transformer_layer_config") if self._by_speculators else self._config
        self._target = target
        self._problems = problems

    def facts(self) -> Eagle3Facts:
        layer, config = self._layer, self._config
        hidden, heads = layer.whole("hidden_size", "MAX_HIDDEN_SIZE"), layer.whole("num_attention_heads", "MAX_HEADS")
        head_dim = layer.whole("head_dim", "MAX_HEAD_DIM", hidden // heads)
        vocab, key = (config, "draft_vocab_size") if config.has("draft_vocab_size") else (layer, "vocab_size")
        return Eagle3Facts(
            path=self._folder,
            hidden_size=hidden,
            num_layers=layer.whole("num_hidden_layers", "MAX_LAYERS", 1),
            num_heads=heads,
            num_kv_heads=layer.whole("num_key_value_heads", "MAX_HEADS", heads),
            head_dim=head_dim,
            intermediate_size=layer.whole("intermediate_size", "MAX_INTERMEDIATE_SIZE"),
            draft_vocab=vocab.whole(key, "MAX_VOCAB"),
            eps=layer.number("rms_norm_eps", "MAX_EPS", 1e-6),
            rope=read_rope(layer, head_dim, self._target.max_position),
            bias=layer.flag("attention_bias", False),
            qk_norm="qwen3" in layer.text("model_type", "") and self._by_speculators,
            aux_layers=self._aux_layers(),
            prefix="layers.0" if self._by_speculators else "midlayer",
            norm_before_residual=config.flag("norm_before_residual", False),
            norm_before_fc=config.flag("norm_before_fc", False),
            fc_norm=config.flag("fc_norm", False) or config.flag("use_aux_norm", False),
            norm_output=config.flag("norm_output", False),
            quantization=config.section("quantization_config").values or None,
        )

    def _aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input is an aux hidden state."""
        nested = self._config.section("eagle_config")
        if not nested.flag("use_aux_hidden_state", True):
            self._problems.append("eagle_config.use_aux_hidden_state=false is EAGLE 1 or 2; EAGLE 3 heads are read")
        stating = next((one for one in (self._config, nested) if one.has(_AUX_IDS)), None)
        total = self._target.num_layers
        if stating is None:
            return (2, total // 2, total - 3)
        ids = stating.wholes(_AUX_IDS, "MAX_LISTED", largest="MAX_LAYERS")
        if len(ids) == NUM_AUX + 1 and self._by_speculators:
            ids = ids[:NUM_AUX]  # the last one is what training compared with
        return tuple(i + (0 if self._by_speculators else 1) for i in ids)


def _check(facts: Eagle3Facts, target: ModelFacts, problems: list[str]) -> None:
    name = target.name
    if facts.hidden_size != target.hidden_size:
        problems.append(f"hidden_size={facts.hidden_size}, {name} has {target.hidden_size}")
    if facts.draft_vocab > target.vocab_size:
        problems.append(f"draft_vocab_size={facts.draft_vocab}, {name} has {target.vocab_size} tokens")
    if len(facts.aux_layers) != NUM_AUX or not all(0 <= layer <= target.num_layers for layer in facts.aux_layers):
        problems.append(
            f"hidden states entering layers {list(facts.aux_layers)} of {name}, which has {target.num_layers} layers; "
            f"expected {NUM_AUX} of them (eagle_aux_hidden_state_layer_ids)"
        )
    if facts.num_heads % facts.num_kv_heads:
        problems.append(f"{facts.num_heads} heads cannot share {facts.num_kv_heads} KV heads")
