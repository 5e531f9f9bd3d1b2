"""A smaller model drafts, the target verifies (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

Any model that the target's architecture plugin describes will do if it reads and writes the same tokens. Its keys and
values are further layers in the target's blocks, so a prefix hit, a preemption or a rollback of the target is one of
the draft model, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor

from engine.checkpoint.files import CheckpointError, read_file
from engine.checkpoint.limits import MAX_TOKENIZER_BYTES
from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.drafter import DraftEngine, DrafterKV, DraftRows, DraftTokens, TargetStep
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.contracts.provider import BuildContext
from engine_plugins.drafter.config import DraftModelConfig
from engine_plugins.drafter.shipped import find_checkpoint


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(msgspec.Struct):
    content: str
    id: int


class _Tokenizer(msgspec.Struct):
    """What a ``tokenizer.json`` says of the ids of its tokens."""

    model: _Model = _Model()
    added_tokens: list[_Added] = []


class DraftModelDrafter:
    """Chains of a whole model."""

    placement: Literal["host", "device"] = "device"
    capturable = True
    aux_layers: tuple[int, ...] = ()
    kv_lookahead = 0

    def __init__(self, config: DraftModelConfig, context: BuildContext) -> None:
        self.max_width = config.max_width
        model = context.read_model(find_checkpoint("draft_model", config.path, context))
        check_same_tokens(model, context.model)
        self._model = model
        graph = context.describe(model)
        self.kv: DrafterKV | None = DrafterKV(graph.caches)
        self.weights_bytes = open_checkpoint(model.path).num_bytes_as(context.dtype, graph.ignored)

    def start(self, engine: DraftEngine) -> None:
        graph: Graph = engine.describe(self._model)
        weights = engine.open(self._model)
        self._enter = weights.enter(graph)
        self._layers = weights.layers(graph)
        self._head = weights.head(graph)
        weights.finish(ignored=("rotary_emb.inv_freq",))

        self._sync, self._chain = engine.captured(self._run), engine.chain(self._next)

    def extend(self, step: TargetStep) -> None:
        """Computes the step's tokens, rejected drafts too: one pass over a few rows more costs next to nothing."""
        self._sync(step.tokens, metadata=step.metadata)

    def propose(self, rows: DraftRows) -> DraftTokens:
        return self._chain(rows)

    def _run(self, tokens: Tensor, metadata: Any) -> Tensor:
        return self._layers.run(*self._enter(tokens), metadata=metadata)

    def _next(self, tokens: Tensor, hidden: Tensor | None, metadata: Any) -> tuple[Tensor, None]:
        logits: Tensor = self._head(self._run(tokens, metadata))
        return logits, None

    def release(self, row_id: int) -> None:
        """Nothing is kept beside the cache."""


def check_same_tokens(draft: ModelFacts, target: ModelFacts) -> None:
    """Raise ``ValueError`` unless both models mean the same by every token id that the draft model can propose."""
    if draft.vocab_size > target.vocab_size:
        raise ValueError(
            f"drafter.path={draft.path}: its vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}"
        )
    ours, theirs = (_vocabulary(Path(model.path)) for model in (draft, target))
    if ours is None or theirs is None:
        return
    other = [token for token, index in ours.items() if index < target.vocab_size and theirs.get(token) != index]
    if other:
        raise ValueError(
            f"drafter.path={draft.path}: another tokenizer than the model's: {len(other)} tokens differ, for example "
            f"{other[0]!r} ({ours[other[0]]} there, {theirs.get(other[0])} here); expected a model of the same family"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Ids by token of a ``tokenizer.json``; ``None`` without one."""
    file = folder / "tokenizer.json"
    if not os.path.lexists(file):
        return None
    data = read_file(file, MAX_TOKENIZER_BYTES, "MAX_TOKENIZER_BYTES")
    try:
        stored = msgspec.json.decode(data, type=_Tokenizer)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error
    vocab = stored.model.vocab
    pairs: Sequence[tuple[str, int]]
    pairs = list(vocab.items()) if isinstance(vocab, dict) else [(token, i) for i, (token, _) in enumerate(vocab)]
    return {**dict(pairs), **{token.content: token.id for token in stored.added_tokens}}
