"""Weights in: checkpoint tensors to packed linears, layer by layer, so that memory stays near one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.checkpoint.parts import Origin, StoredPart, joined_origins, origin_of_tensor
from engine.checkpoint.tensors import Checkpoint, CheckpointError, TensorEntry, open_checkpoint
from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LayerOp, LinearPart, LinearSpec, ModelOps, NormGateUpAct, NormQKVRopeWrite, NormSpec
from engine.contracts.parallelism import Parallelism
from engine.contracts.quantizer import PackedLinear, Quantizer, StoredTensor
from engine.kernels.checks.linear import LinearCheck
from engine.kernels.cpu.memory import keep_freed_memory
from engine.kernels.cpu.row_ops import lookup
from engine.kernels.lowering import (
    Kernels,
    Lowering,
    describe,
    lower_head,
    lower_layer_op,
    lower_rotations,
    rope_kinds,
)
from engine.kernels.model import LoweredModel, LoweredOp
from engine.models.required_tensors import (
    check_names,
    check_readable,
    is_stored,
    kv_scale_names,
    linear_of,
    op_norms,
    plain_shape,
    stored_of,
)
from engine.models.sharding import check_heads, cut, rank_of

_WITHOUT_SCALES = "kv_format=NAME of a format without scales of the checkpoint needs none"

Progress = Callable[[float, str], None]


def load_model(
    model: ModelFacts,
    ops: ModelOps,
    quantizer: Quantizer,
    attention_kernel: AttentionKernel,
    kv_format: KVFormat,
    parallelism: Parallelism,
    dtype: str,
    device: str,
    on_progress: Progress | None = None,
    *,
    kernels: Kernels = "torch",
    first_layer: int = 0,
) -> LoweredModel:
    """Read, check, shard and pack the checkpoint at ``model.path`` and lower ``ops`` on it.

    ``dtype``: ``float32``, ``bfloat16`` or ``float16``; ``on_progress(fraction, what)`` is called after every layer.
    ``kernels`` as in :class:`~engine.kernels.lowering.Lowering`; ``first_layer``: where in the cache the model's
    layers begin. Raises :class:`CheckpointError` for a checkpoint that is damaged or does not fit ``ops``,
    ``ValueError`` for a model that cannot be split as ``parallelism`` asks.
    """
    lowering = Lowering(
        device=device,
        dtype=getattr(torch, dtype),
        attention=attention_kernel,
        kv_format=kv_format,
        parallelism=parallelism,
        rope_kinds=rope_kinds(ops.layers),
        kernels=kernels,
    )
    if lowering.on_cpu:
        keep_freed_memory()
    checkpoint = open_checkpoint(model.path)
    check_readable(checkpoint, ops, quantizer, model.path)
    check_names(checkpoint, ops, quantizer, model.path)
    loader = Loader(checkpoint, quantizer, lowering, on_progress, first_layer)
    with torch.inference_mode():
        return loader.load(model, ops)


class Loader:
    """One load: counts bytes and keeps what each kind of op runs on.

    ``first_layer``: where in the cache layer 0 keeps its keys and values. ``used`` is given the names that are read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantizer: Quantizer,
        lowering: Lowering,
        on_progress: Progress | None = None,
        first_layer: int = 0,
        used: set[str] | None = None,
    ) -> None:
        self._used = set() if used is None else used
        self._checkpoint = checkpoint
        self._quantizer = quantizer
        self.lowering = lowering
        self._on_progress = on_progress
        self._first_layer = first_layer
        self._check = LinearCheck(quantizer, lowering.dtype, lowering.device)
        self._linears: dict[str, PackedLinear] = {}
        self._held: dict[int, int] = {}
        """Bytes by storage: tied weights count once."""
        self._read = 0
        self._kv_scales: list[tuple[Tensor, Tensor] | None] = []

    def load(self, model: ModelFacts, ops: ModelOps) -> LoweredModel:
        lowering = self.lowering
        table = self.tensor(f"{ops.embed.name}.weight", (ops.embed.vocab_size, ops.embed.hidden_size))
        table = table.to(device=lowering.device, dtype=lowering.dtype)
        self.hold(table)
        layers = []
        for index, layer_ops in enumerate(ops.layers):
            layers.append(self.layer(index, layer_ops))
            self._report(f"layer {index + 1}/{len(ops.layers)}")
        tied = table if ops.head.tied else None
        head = self.pack("LMHead", ops.head.head, tied, self._table_origin(ops) if ops.head.tied else None)
        lowered_head = lower_head(lowering, ops.head, self.norm(ops.head.norm, ops.embed.hidden_size), head)
        self._report("head")
        embed = partial(lookup, table, name="embedded")
        rotate = lower_rotations(lowering, model.head_dim, model.max_position)
        return LoweredModel(
            embed=embed,
            layers=tuple(layers),
            project=lowered_head.project,
            lm_head=lowered_head.lm_head,
            rotate=rotate,
            attention=lowering.attention,
            lowering=describe(lowering, ops, self._linears),
            weights_bytes=sum(self._held.values()),
            on_triton=lowering.kernels == "triton",
            project_greedy=lowered_head.project_greedy,
            capturable=lowering.native and lowering.why_uncaptured is None,
            why_uncaptured=(lowering.why_uncaptured or "") if lowering.native else "",
            kv_scales=tuple(self._kv_scales),
        )

    def layer(self, index: int, ops: Sequence[LayerOp]) -> tuple[LoweredOp, ...]:
        lowered = []
        for op in ops:
            norms = {norm.name: self.norm(norm, size) for norm, size in op_norms(op)}
            spec = linear_of(op)
            act = op.act if isinstance(op, NormGateUpAct) else "silu"
            packed = None if spec is None else self.pack(type(op).__name__, spec, act=act)
            if isinstance(op, NormQKVRopeWrite):
                check_heads(op, self.lowering.tp)
                self._kv_scales.append(self._scales_of(op))
            lowered.append(lower_layer_op(self.lowering, op, self._first_layer + index, norms, packed))
        return tuple(lowered)

    def pack(
        self,
        kind: str,
        spec: LinearSpec,
        tied: Tensor | None = None,
        origin: Origin | None = None,
        act: str = "silu",
    ) -> PackedLinear:
        """``tied``: the weight, where it is the embedding's; ``origin``: of it, if known; ``act``: of a ``gate_up``."""
        parts: list[Mapping[str, Tensor]]
        index, count = rank_of(self.lowering.parallelism, spec)
        if tied is None:
            parts = [self._part(spec, part) for part in spec.parts]
        else:
            mine = cut(tied, "the embedding", spec, StoredTensor("weight", {"out": 0, "in": 1}), index, count)
            parts = [{"weight": mine} if origin is None else StoredPart({"weight": lambda: mine}, origin)]
        in_features = spec.in_features // count if spec.shard == "in" else spec.in_features
        out_features = spec.out_features // count if spec.shard == "out" else spec.out_features
        made = self._quantizer.pack(spec, parts, self.lowering.dtype, self.lowering.device)
        packed = self._check(spec, parts, made, in_features, out_features, act)
        for tensor in packed.tensors.values():
            self.hold(tensor)
        self._linears[kind] = _also(self._linears.get(kind), packed)
        return packed

    def _scales_of(self, op: NormQKVRopeWrite) -> tuple[Tensor, Tensor] | None:
        """The checkpoint's scales for this layer's cached keys and values: float32, one per KV head of this rank.

        ``None`` where there are none, or the cache's format has no place for them: they are then not even read.
        """
        if self.lowering.kv_format.scale != "per_layer_head":
            return None
        names = kv_scale_names(self._quantizer, op)
        key, value = (self._kv_scale(among, op) for among in (names.key, names.value))
        if key is None or value is None:
            if key is not value:
                found, lacking = ("keys", names.value) if value is None else ("values", names.key)
                raise CheckpointError(
                    f"the checkpoint has a scale for cached {found}, but none of {', '.join(lacking)}; "
                    f"{_WITHOUT_SCALES}"
                )
            return None
        return key, value

    def _kv_scale(self, names: Sequence[str], op: NormQKVRopeWrite) -> Tensor | None:
        name = next((name for name in names if name in self._checkpoint.names), None)
        if name is None:
            return None
        stored = self.tensor(name, None)
        scale = stored.flatten().float()
        if scale.numel() not in (1, op.num_kv_heads):
            raise CheckpointError(f"{name} has shape {list(stored.shape)}, expected one scale or {op.num_kv_heads}")
        if not stored.is_floating_point():
            raise CheckpointError(f"{name} is {stored.dtype}, expected a floating-point number; {_WITHOUT_SCALES}")
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise CheckpointError(f"{name} holds {scale.tolist()}: a scale is a positive number; {_WITHOUT_SCALES}")
        index, count = rank_of(self.lowering.parallelism, op.qkv)
        mine = scale.expand(op.num_kv_heads).chunk(count)[index].contiguous().to(self.lowering.device)
        self.hold(mine)
        return mine

    def _table_origin(self, ops: ModelOps) -> Origin:
        """Of this rank's part of the embedding as it is on the device."""
        name = f"{ops.embed.name}.weight"
        index, count = rank_of(self.lowering.parallelism, ops.head.head)
        return origin_of_tensor(name, self._checkpoint.entry(name), f"as {self.lowering.dtype}, {index}/{count}")

    def _part(self, spec: LinearSpec, part: LinearPart) -> StoredPart:
        """This rank's cut of one part's tensors, by suffix."""
        index, count = rank_of(self.lowering.parallelism, spec)
        readers: dict[str, Callable[[], Tensor]] = {}
        origins = []
        for stored in stored_of(self._quantizer, spec):
            name = f"{part.name}.{stored.suffix}"
            if not is_stored(stored, part):
                continue
            if name not in self._checkpoint.names:
                continue
            entry = self._claim(name, plain_shape(part, spec, stored))
            if stored.suffix == "bias" and spec.shard == "in" and index > 0:
                continue  # partial sums are added up: only one rank may bring the bias
            readers[stored.suffix] = partial(self._read_cut, name, spec, stored, index, count)
            origins.append(origin_of_tensor(name, entry, f"{spec.shard} {index}/{count}"))
        return StoredPart(readers, joined_origins(origins))

    def _read_cut(self, name: str, spec: LinearSpec, stored: StoredTensor, index: int, count: int) -> Tensor:
        return cut(self._checkpoint.read(name), name, spec, stored, index, count)

    def norm(self, norm: NormSpec, size: int) -> Tensor:
        weight = self.tensor(f"{norm.name}.weight", (size,)).float().to(self.lowering.device)
        self.hold(weight)
        return weight

    def tensor(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        self._claim(name, shape)
        return self._checkpoint.read(name)

    def _claim(self, name: str, shape: tuple[int, ...] | None) -> TensorEntry:
        """Count a tensor as used and check its shape."""
        entry = self._checkpoint.entry(name)
        if shape is not None and entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, the model expects {list(shape)}"
            )
        self._read += entry.num_bytes
        self._used.add(name)
        return entry

    def hold(self, tensor: Tensor) -> None:
        # An opaque oneDNN tensor has no storage to tell apart; it is never shared.
        key = id(tensor) if tensor.is_mkldnn else tensor.data_ptr()
        self._held[key] = tensor.numel() * tensor.element_size()

    def _report(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(min(1.0, self._read / max(1, self._checkpoint.num_bytes)), what)


def _also(first: PackedLinear | None, packed: PackedLinear) -> PackedLinear:
    """``first``, and in its label what other layers of the same kind run on."""
    if first is None:
        return packed
    if packed.label in first.label.split(" | "):
        return first
    return replace(first, label=f"{first.label} | {packed.label}")
