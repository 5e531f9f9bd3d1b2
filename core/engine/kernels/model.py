"""A model ready to run: its embedding, layers and head as lists of kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.graph import Graph
from engine.contracts.ops import Attention
from engine.kernels.context import Cache, Call, ForwardBatch, Greedy, Rotate, StepContext, prepared_of
from engine.kernels.cpu.program import NotNative, Value, scratch
from engine.kernels.cpu.row_ops import StepTable, Table, cloned, in_place_of
from engine.kernels.torch.reference import most_likely


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a kernel, and the numbers of the values that it reads and makes."""

    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_use: tuple[int, ...]
    """Values that nobody reads after it."""
    writes: int | None = None
    """The cache that keys and values go into."""


@dataclass(frozen=True, slots=True)
class LoweredBlock:
    """The calls of a block, in order."""

    steps: tuple[Step, ...]
    residual: int | None = None
    """Of a layer: the value that enters it as the residual stream."""
    labels: tuple[str, ...] = ()
    """What runs for each sequence of ops, in words."""

    def run(self, values: dict[int, Tensor], context: StepContext | None) -> None:
        """Compute what the block makes of ``values``, by number. What nobody reads any more leaves them; the memory of
        the residual stream may be overwritten."""
        for step in self.steps:
            made = step.call(context, *[values[number] for number in step.inputs])
            for number in step.last_use:
                del values[number]
            if len(step.outputs) == 1:
                values[step.outputs[0]] = made
            elif step.outputs:
                values.update(zip(step.outputs, made, strict=True))
            if step.writes is not None and context is not None and context.dealt is not None:
                context.dealt.written(context.kv, step.writes)

    def of_rows(self, rows: Tensor) -> Tensor:
        """What the block's last call makes of the one value that its first reads."""
        values = {self.steps[0].inputs[0]: rows}
        self.run(values, None)
        return values[self.steps[-1].outputs[0]]


def entrance(graph: Graph, embedding: LoweredBlock) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What makes of tokens, int64 ``[T]``, all that enters the layers of a graph (:attr:`Graph.entering`)."""
    tokens, entering = graph.inputs[0], graph.entering

    @torch.inference_mode()
    def enter(token_ids: Tensor) -> tuple[Tensor, ...]:
        values = {tokens: token_ids}
        embedding.run(values, None)
        return tuple([values[number] for number in entering])

    return enter


def run_layer(layer: LoweredBlock, values: dict[int, Tensor], context: StepContext, following: int) -> None:
    """Run a layer. ``following``: the value after it that the next one reads as its residual. Raises
    :class:`NotNative` for values of a program if later layers read more of it."""
    assert layer.residual is not None
    residual, before = values[layer.residual], values.keys() - {layer.residual}
    with scratch(residual):  # nothing but the residual outlives its layer
        layer.run(values, context)
        if isinstance(residual, Value) and values.keys() - before - {following}:
            raise NotNative("later layers read more of one than its residual stream")
        values[following] = in_place_of(residual, values[following])


class SmallSteps(Protocol):
    """Steps of few tokens on one cache as programs."""

    programs: Any
    """:class:`engine.kernels.cpu.captured.Programs`"""

    def __call__(
        self, batch: ForwardBatch, kv: Cache, aux_layers: Sequence[int], received: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]] | None:
        """As :meth:`LoweredModel.forward`, or ``None`` for a step that has to run op by op."""
        ...


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """Made by :func:`engine.kernels.loading.load_model`."""

    graph: Graph
    embedding: LoweredBlock
    layers: tuple[LoweredBlock, ...]
    head_block: LoweredBlock
    normed_head: LoweredBlock
    """:attr:`head_block` without the final norm."""
    rotate: Rotate
    """``positions [T]`` -> :attr:`StepContext.rotations`"""
    attention: AttentionKernel
    lowering: tuple[str, ...]
    """What runs for each sequence of ops, one line each, for the plan."""
    weights_bytes: int
    own_head: LoweredBlock | None = None
    """Where ranks share out the vocabulary: :attr:`head_block` up to the logits of this rank's tokens."""
    first_token: int = 0
    """Of these tokens."""
    dtype: torch.dtype = torch.float32
    """Of the residual stream."""
    device: str = "cpu"
    on_triton: bool = False
    """Lowered to Triton kernels: tokens are chosen by such kernels too."""
    find_greedy: Greedy | None = None
    """:meth:`greedy`, where a kernel finds the tokens beside the logits."""
    capturable: bool = False
    """Steps of few tokens may run as programs, as far as the plan tells."""
    why_uncaptured: str = ""
    """Why they may not, where they might with other plugins."""
    waits: str = ""
    """Why its steps wait for the device, so that no CUDA graph can hold one; empty: they do not."""
    small_steps: SmallSteps | None = None
    """See :func:`engine.kernels.cpu.captured.capture_steps`."""
    kv_scales: tuple[tuple[Tensor, Tensor] | None, ...] = ()
    """By cache, the checkpoint's scales for cached keys and for cached values in float8 (e4m3), float32
    ``[num_kv_heads]`` on the device: a stored number times its scale is the key. ``None`` where it has none."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the checkpoint was read."""
    expert_counts: Mapping[int, Tensor] = field(default_factory=dict)
    """Where experts are counted: by layer, int64 ``[num_experts]`` on the device, how many pairs of a token and an
    expert went to each."""

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv: Cache, aux_layers: Sequence[int] = (), received: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers and write the batch's keys and values.

        Returns the residual stream ``[T, hidden_size]`` before the final norm, and for each of
        ``aux_layers`` the residual entering that layer (``num_layers``: the one returned), ``[T, hidden_size]``; of a
        stage that hands on more than its residual stream (:attr:`Graph.handed_on`), then the rest of that.
        ``received``: what the stage before handed on, ``[T, size]`` each; it may be overwritten.
        """
        if self.small_steps is not None and batch.dealt is None:
            done = self.small_steps(batch, kv, aux_layers, received)
            if done is not None:
                return done
        return self.run(batch, kv, prepared_of(self.attention, batch.attention), aux_layers, received)

    @torch.inference_mode()
    def run(
        self,
        batch: ForwardBatch,
        kv: Cache,
        prepared: tuple[Any, ...],
        aux_layers: Sequence[int] = (),
        received: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """:meth:`forward` with what the attention kernel prepared for this batch, by KV group: the part that can be
        captured, or written as a program, of values."""
        context = self._context(batch, kv, prepared)
        if self.graph.received:
            values = dict(zip(self.graph.received, received, strict=True))
        else:
            values = {self.graph.inputs[0]: batch.token_ids}
            self.embedding.run(values, None)
        aux: dict[int, Tensor] = {}
        for index, (layer, entering) in enumerate(zip(self.layers, self._residuals, strict=True)):
            if index in aux_layers:
                aux[index] = cloned(values[entering])  # layers add to the residual in place
            run_layer(layer, values, context, self._residual(index + 1))
        residual = aux[len(self.layers)] = values[self.graph.hidden]
        beside = [values[number] for number in self.graph.handed_on[1:]]
        return residual, [*(aux[aux_layer] for aux_layer in aux_layers), *beside]

    @property
    def layers_of_each_kind(self) -> tuple[LoweredBlock, ...]:
        """Of layers of the same ops, sizes and kernels the first. All where one reads more than its residual stream and
        what was there before all layers."""
        graph, found = self.graph, dict[Any, LoweredBlock]()
        for block, layer in zip(graph.layers, self.layers, strict=True):
            known = {block.residual, *graph.entering}
            for node in block.nodes:
                if not known.issuperset(node.inputs):
                    return self.layers
                known.update(node.outputs)
            ops = [(type(node.op), *(graph.sizes[number] for number in node.outputs)) for node in block.nodes]
            attention = [node.op for node in block.nodes if isinstance(node.op, Attention)]
            found.setdefault((layer.labels, *ops, *attention), layer)
        return tuple(found.values())

    @torch.inference_mode()
    def run_apart(self, layers: Sequence[LoweredBlock], batch: ForwardBatch, kv: Cache) -> Tensor:
        """Run each of these layers on what is embedded, which comes back, ``[T, hidden_size]``."""
        context = self._context(batch, kv, prepared_of(self.attention, batch.attention))
        values = {self.graph.inputs[0]: batch.token_ids}
        self.embedding.run(values, None)
        embedded = values[self._residual(0)]
        for layer in layers:
            assert layer.residual is not None
            layer.run({**values, layer.residual: embedded.clone()}, context)
        return embedded

    def expert_load(self) -> dict[int, tuple[int, ...]]:
        """:attr:`expert_counts` on the host. Waits for the device."""
        return {layer: tuple(counts.tolist()) for layer, counts in self.expert_counts.items()}

    @torch.inference_mode()
    def forget_expert_load(self) -> None:
        """Count from 0 on."""
        for counts in self.expert_counts.values():
            counts.zero_()

    def _context(self, batch: ForwardBatch, kv: Cache, prepared: tuple[Any, ...]) -> StepContext:
        rotations = self.rotate(batch.positions)
        return StepContext(
            rotations, batch.slot_mappings, prepared, kv, batch.positions, batch.attention, batch.dealt, batch.row_ids
        )

    @property
    def _residuals(self) -> list[int]:
        return [self._residual(index) for index in range(len(self.layers))]

    def _residual(self, index: int) -> int:
        """The value entering layer ``index``; after the last layer, that entering the head."""
        found = self.layers[index].residual if index < len(self.layers) else self.graph.hidden
        assert found is not None
        return found

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[T]`` -> the residual stream ``[T, hidden_size]`` that enters the model's first layer."""
        values = {self.graph.inputs[0]: token_ids}
        self.embedding.run(values, None)
        first = self.embedding.residual
        return values[self._residual(0) if first is None else first]

    @property
    def embedding_table(self) -> Table | None:
        """What :meth:`embed` looks tokens up in; ``None`` where it does more than that."""
        calls = [step.call for step in self.embedding.steps]
        return calls[0].table if len(calls) == 1 and isinstance(calls[0], StepTable) else None

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """``[R, hidden_size]`` residual rows -> float32 logits ``[R, vocab]``."""
        return self.head_block.of_rows(hidden)

    @torch.inference_mode()
    def lm_head(self, normed: Tensor) -> Tensor:
        """:meth:`head` without the norm: for rows that are normed already."""
        return self.normed_head.of_rows(normed)

    @torch.inference_mode()
    def greedy(self, hidden: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """:meth:`head`, and the most likely token of each row, int64 ``[R]``: the lowest id among equals, -1 where
        logits are broken. ``out``: where the logits are to be, float32 ``[R, vocab]``, contiguous."""
        if self.find_greedy is not None:
            return self.find_greedy(hidden, out)
        logits = self.head(hidden)
        logits = logits if out is None else out.copy_(logits)
        return logits, most_likely(logits)
