"""Run the model layer by layer over calibration text and see what goes into its linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.tensors import Checkpoint
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import Quantizer
from engine.kernels.context import StepContext
from engine.kernels.linear import PackedLinear
from engine.kernels.loading import Loader
from engine.kernels.model import LoweredBlock, LoweredModel
from engine.kernels.settings import Lowering
from engine.kv.cache import KVCache
from engine.kv.groups import one_group
from engine_plugins.quantizer.unquantized import joined_bias, joined_weight

BLOCK_SIZE = 16
BATCH_TOKENS = 4096


class Inputs:
    """Statistics of the inputs of a linear layer: ``hessian = X^T X [in, in]``, and their sizes by channel."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.hessian = torch.zeros(size, size, device=device)
        self.max_abs = torch.zeros(size, device=device)
        self._sum_abs = torch.zeros(size, device=device)
        self._count = 0

    def add(self, x: Tensor) -> None:
        """``x [M, in]``."""
        wide = x.float()
        self.hessian += wide.T @ wide
        sizes = wide.abs()
        self._sum_abs += sizes.sum(dim=0)
        self.max_abs = torch.maximum(self.max_abs, sizes.amax(dim=0))
        self._count += len(x)

    @property
    def mean_abs(self) -> Tensor:
        return self._sum_abs / max(1, self._count)


@dataclass(frozen=True, slots=True)
class Moments:
    """What a linear layer should compute, and from what. ``X``: its inputs in the unquantized model, ``Z``: its inputs
    where all before it is rounded, ``D``: what the residual stream of the latter lacks.

    ``hessian = Z^T Z`` and ``cross = X^T Z``, ``[in, in]``; ``drift = D^T Z [out, in]``, for layers whose output is
    added to the residual stream as it is, else zero.
    """

    hessian: Tensor
    cross: Tensor
    drift: Tensor

    def target(self, weight: Tensor) -> Tensor:
        """``(X W^T + D)^T Z [out, in]``: what should come out, beside the inputs that there are."""
        return weight @ self.cross + self.drift


class Linear:
    """A linear layer of the running model.

    ``weight``: ``[out, in]``, of all parts; ``rounded``: float32, what to use instead; ``bias``: float32 ``[out]`` or
    ``None``. ``divide [in]``: inputs are divided by it, as the checkpoint that is written does in the norm before.
    """

    def __init__(self, spec: LinearSpec, weight: Tensor, bias: Tensor | None) -> None:
        self.spec = spec
        self.weight = weight
        self.rounded: Tensor | None = None
        self.bias = bias
        self.divide: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if self.rounded is None else self.rounded
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(self.divided(x), weight.to(x.dtype), bias)

    def divided(self, x: Tensor) -> Tensor:
        """What the weight is multiplied by, of inputs ``[M, in]`` as the running model computes them."""
        return x if self.divide is None else x / self.divide


class Recorder(Loader):
    """Loads a model and keeps every linear layer at hand, by the name of its first part."""

    def __init__(self, checkpoint: Checkpoint, quantizer: Quantizer, lowering: Lowering) -> None:
        super().__init__(checkpoint, quantizer, lowering)
        self.linears: dict[str, Linear] = {}

    def pack_parts(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]]) -> PackedLinear:
        device = self.lowering.device
        weight, bias = joined_weight(parts).to(device), joined_bias(parts)
        linear = Linear(spec, weight, None if bias is None else bias.float().to(device))
        self.linears[spec.parts[0].name] = linear
        return PackedLinear({"weight": weight}, linear, linear, spec.out_features, label="recorded")


Values = dict[int, Tensor]
"""Between two ops: what later ones read, by number."""


def _after(steps: slice, block: LoweredBlock, values: Values, context: StepContext) -> Values:
    """What some calls of a block make of ``values``, which stay as they are."""
    values = _copied(values)
    LoweredBlock(block.steps[steps]).run(values, context)
    return values


def _copied(values: Values) -> Values:
    """For calls that overwrite what nobody reads after them."""
    return {number: value.clone() for number, value in values.items()}


class LayerRunner:
    """All samples on their way through the model, one layer at a time: as the unquantized model computes them, and as
    the model does that is rounded so far.

    ``model`` is lowered op by op: call ``i`` of a layer is node ``i`` of its block.
    """

    def __init__(
        self,
        facts: ModelFacts,
        model: LoweredModel,
        kv_format: KVFormat,
        samples: Sequence[Sequence[int]],
        dtype: str,
        device: str,
    ) -> None:
        batches = _batches(samples)
        most = max(sum(-(-len(row) // BLOCK_SIZE) for row in rows) for rows in batches)
        kv = KVCache(one_group(model.graph.caches), kv_format, [most], BLOCK_SIZE, dtype, device)
        self._layers = model.layers
        self._contexts = [_context(model, rows, kv, device) for rows in batches]
        self._exact: list[Values] = []
        for rows in batches:
            tokens = torch.tensor([token for row in rows for token in row], device=device)
            values = {model.graph.inputs[0]: tokens}
            model.embedding.run(values, None)
            self._exact.append(values)
        self._rounded = list(self._exact)

    def inputs(self, layer: int, linears: Mapping[int, Linear]) -> dict[int, Inputs]:
        """What goes into the linear layers of the unquantized model, by the index of their node. Nothing moves on."""
        found = {index: _new_inputs(linear) for index, linear in linears.items()}
        for start, context in zip(self._exact, self._contexts, strict=True):
            values = _copied(start)
            for index, step in enumerate(self._layers[layer].steps):
                if index in linears:
                    found[index].add(linears[index].divided(values[step.inputs[0]]))
                LoweredBlock((step,)).run(values, context)
        return found

    def moments(self, linear: Linear, reads: int, added_to: int | None) -> Moments:
        """Of a linear layer that is computed next. ``reads``: the value that it reads; ``added_to``: that which its
        output is added to, if that is all that is done with it."""
        out, size, device = linear.spec.out_features, linear.spec.in_features, linear.weight.device
        found = Moments(*(torch.zeros(rows, size, device=device) for rows in (size, size, out)))
        for exact, rounded in zip(self._exact, self._rounded, strict=True):
            x, z = (linear.divided(values[reads]).float() for values in (exact, rounded))
            found.hessian.addmm_(z.T, z)
            found.cross.addmm_(x.T, z)
            if added_to is not None:
                found.drift.addmm_((exact[added_to] - rounded[added_to]).float().T, z)
        return found

    def is_computed(self, value: int) -> bool:
        """Whether the samples have got so far."""
        return value in self._exact[0]

    def advance(self, layer: int, nodes: slice) -> None:
        """Move the unquantized model's samples over some nodes of a layer."""
        self._exact = self._moved(self._exact, layer, nodes)

    def advance_rounded(self, layer: int, nodes: slice) -> None:
        """Move the rounded model's samples over some nodes, whose linear layers are rounded by now."""
        self._rounded = self._moved(self._rounded, layer, nodes)

    def _moved(self, samples: Sequence[Values], layer: int, nodes: slice) -> list[Values]:
        pairs = zip(samples, self._contexts, strict=True)
        return [_after(nodes, self._layers[layer], values, context) for values, context in pairs]


def _new_inputs(linear: Linear) -> Inputs:
    return Inputs(linear.spec.in_features, linear.weight.device)


def _batches(samples: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Samples in batches of about :data:`BATCH_TOKENS` tokens."""
    batches: list[list[Sequence[int]]] = [[]]
    for sample in samples:
        if sum(map(len, batches[-1])) + len(sample) > BATCH_TOKENS and batches[-1]:
            batches.append([])
        batches[-1].append(sample)
    return batches


def _context(model: LoweredModel, rows: Sequence[Sequence[int]], kv: KVCache, device: str) -> StepContext:
    """Every sample is a row of its own, with its own blocks."""
    lengths = tuple(len(row) for row in rows)
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    slots, first = [], 0
    for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(first * BLOCK_SIZE, first * BLOCK_SIZE + length))
        first += count
    attention = AttentionBatch(
        q_lens=lengths,
        kv_lens=lengths,
        block_tables=tables.to(device),
        q_starts=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        kv_lens_device=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_size=BLOCK_SIZE,
    )
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return StepContext(
        rotations=model.rotate(positions),
        slot_mappings=(torch.cat(slots).to(device),),
        prepared=(model.attention.prepare(attention),),
        kv=kv,
        positions=positions,
        batches=(attention,),
    )
