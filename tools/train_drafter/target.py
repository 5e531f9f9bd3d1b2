"""The model that drafts are for: its hidden states and what it would say, over batches of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.compose import quoted
from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.kernels.context import ForwardBatch
from engine.kv.cache import KVCache
from engine.kv.groups import one_group
from engine.startup.checks import check_attention
from engine.startup.rank import load_plan

HEAD_ROWS = 256
"""Rows of logits at a time."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the target computes over sequences padded to ``T`` tokens; padding holds zeros."""

    aux_layers: Tensor
    """``[rows, T, len(aux_layers) * hidden_size]`` in the compute dtype: residuals side by side, in this order."""
    residual: Tensor
    """``[rows, T, hidden_size]``: after the last layer, before the final norm."""


class Target:
    """Any model that the engine serves, loaded by the engine itself."""

    def __init__(self, path: str, device: str = "auto", dtype: str = "auto") -> None:
        """``path``: as ``model.path``. Raises :class:`engine.assembly.errors.AssemblyError` with every problem."""
        overrides = [f"model.path={quoted(path)}", f"device={device}", f"model.dtype={dtype}", "execution=eager"]
        self.plan = assemble([*overrides, "kv_format=native", "drafter=none"], download=True)
        self._bound = bind(self.plan)
        check_attention(self.plan, self._bound)
        self._model = load_plan(self.plan, self._bound)
        self._block_size = self._bound.context.block_size
        self._cache: KVCache | None = None

    @property
    def facts(self) -> ModelFacts:
        return self.plan.model

    @property
    def graph(self) -> Graph:
        return self._model.graph

    @property
    def device(self) -> str:
        return self.plan.device.kind

    @torch.inference_mode()
    def embedding(self) -> Tensor:
        """The whole table as the first layer gets it: float32 ``[vocab, hidden_size]``, on the device."""
        rows = torch.split(torch.arange(self.facts.vocab_size, device=self.device), 8192)
        return torch.cat([self._model.embed(ids).float() for ids in rows])

    def head_weight(self) -> Tensor | None:
        """Of the vocabulary projection, float32 ``[vocab, hidden_size]`` on the host; ``None``: it is quantized."""
        stored = open_checkpoint(self.facts.path)
        graph = self.graph
        part = graph.embedding.name if graph.lm_head.tied else graph.lm_head.spec.parts[0].name
        name = f"{part}.weight"
        if name not in stored.names or not stored.entry(name).dtype.is_floating_point:
            return None
        weight = stored.read(name)
        return weight.float() if weight.shape == (self.facts.vocab_size, self.facts.hidden_size) else None

    @torch.inference_mode()
    def see(self, sequences: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> Seen:
        """Run sequences from position 0. State ``i``: the residual entering layer ``i`` (``num_layers``: the last)."""
        lengths = [len(tokens) for tokens in sequences]
        residual, aux = self._model.forward(self._batch(sequences, lengths), self._kv(lengths), tuple(aux_layers))
        flat = torch.cat(aux, dim=-1) if aux else residual.new_zeros(len(residual), 0)
        return Seen(_padded(flat, lengths), _padded(residual, lengths))

    @torch.inference_mode()
    def likeliest(self, residual: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` most likely next tokens of residual rows ``[R, hidden_size]``, the first first, int64
        ``[R, count]``, and their probabilities at temperature 1, float32: what is left out is not made up for."""
        ids, probabilities = [], []
        for rows in torch.split(residual, HEAD_ROWS):
            found = self._model.head(rows).log_softmax(dim=-1).topk(count, dim=-1)
            ids.append(found.indices)
            probabilities.append(found.values.exp())
        return torch.cat(ids), torch.cat(probabilities)

    def _kv(self, lengths: Sequence[int]) -> KVCache:
        """Room for every sequence, block 0 left free as in the engine."""
        blocks = 1 + sum(-(-length // self._block_size) for length in lengths)
        if self._cache is None or self._cache.num_blocks < (blocks,):
            plan, caches = self.plan, one_group(self._model.graph.caches)
            self._cache = KVCache(
                caches, self._bound.kv_format, [blocks], self._block_size, plan.dtype, plan.device.kind
            )
        return self._cache

    def _batch(self, sequences: Sequence[Sequence[int]], lengths: Sequence[int]) -> ForwardBatch:
        size, device = self._block_size, self.device
        needed = [-(-length // size) for length in lengths]
        tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        mapping, first = [], 1
        for row, (blocks, length) in enumerate(zip(needed, lengths, strict=True)):
            tables[row, :blocks] = torch.arange(first, first + blocks)
            mapping.append(torch.arange(first * size, first * size + length))
            first += blocks
        attention = AttentionBatch(
            q_lens=tuple(lengths),
            kv_lens=tuple(lengths),
            block_tables=tables.to(device),
            q_starts=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            kv_lens_device=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_size=size,
        )
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return ForwardBatch(
            token_ids=torch.tensor([token for tokens in sequences for token in tokens], device=device),
            positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
            slot_mappings=(torch.cat(mapping).to(device),),
            attention=(attention,),
            row_ids=rows.to(device),
        )


def _padded(flat: Tensor, lengths: Sequence[int]) -> Tensor:
    """``[sum(lengths), size] -> [rows, max(lengths), size]``"""
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(flat, list(lengths))), batch_first=True)
