"""Weights in: checkpoint tensors to packed linears, layer by layer, so that memory stays near one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.checkpoint.parts import StoredPart, joined_origins, origin_of_tensor
from engine.checkpoint.tensors import Checkpoint, CheckpointError, check_finite
from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.communicator import Communicator
from engine.contracts.graph import Block, Graph, Node
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelConfig
from engine.contracts.ops import (
    AllGather,
    CountExperts,
    Cut,
    Embed,
    Experts,
    HeadLinear,
    KVWrite,
    Linear,
    LinearSpec,
    Norm,
    Router,
)
from engine.contracts.quantizer import Quantizer, StoredTensor, UnpackingQuantizer
from engine.kernels.backends import fused_block, fused_graph, joins_norms, rotations
from engine.kernels.context import Call, Greedy
from engine.kernels.cpu.memory import keep_freed_memory
from engine.kernels.cpu.row_ops import cat
from engine.kernels.labels import Labels
from engine.kernels.linear import PackedLinear
from engine.kernels.model import LoweredBlock, LoweredModel, Step
from engine.kernels.packer import Packer
from engine.kernels.packing import Target
from engine.kernels.settings import Kernel, Kernels, Lowered, Lowering
from engine.kernels.torch.patterns import lower_rotations
from engine.models.checkpoint_checks import check_shape, checked_checkpoint, checkpoint_notes, unread_bytes
from engine.models.fuse import Fused
from engine.models.fused_experts import is_pair
from engine.models.manifest import Manifest, ManifestEntry, ManifestTensor, as_they_are, projection
from engine.plugin_guard.calls import PluginError, contract_error, name_of, quote

_WITHOUT_SCALES = "kv_format=NAME of a format without scales of the checkpoint needs none"

Progress = Callable[[float, str], None]
_Stored = tuple[LinearSpec, Sequence[Mapping[str, Tensor]]]


def load_model(
    model: ModelConfig,
    graph: Graph,
    quantizer: Quantizer,
    attention_kernel: AttentionKernel,
    kv_format: KVFormat,
    dtype: str,
    device: str,
    on_progress: Progress | None = None,
    *,
    kernels: Kernels = "torch",
    max_len: int | None = None,
    own: Graph | None = None,
    collectives: Communicator | None = None,
) -> LoweredModel:
    """Read, check and pack the checkpoint at ``model.path`` and lower ``graph`` on it.

    ``dtype``: ``float32``, ``bfloat16`` or ``float16``; ``on_progress(fraction, what)`` is called after every layer.
    ``kernels`` as in :class:`~engine.kernels.settings.Lowering`; ``max_len``: most tokens of a sequence that is served,
    ``None`` for all that the model has positions for. ``own``: what of ``graph`` this rank computes
    (:func:`engine.models.placement.place`), ``None`` for all; then only its share of the checkpoint is read. Raises
    :class:`CheckpointError` for a checkpoint that is damaged or does not fit ``graph``.
    """
    own = graph if own is None else own
    lowering = Lowering(
        device=device,
        dtype=getattr(torch, dtype),
        attention=attention_kernel,
        kv_format=kv_format,
        rotations=rotations(own),
        kernels=kernels,
        collectives=collectives,
    )
    if lowering.on_cpu:
        keep_freed_memory()
    checkpoint = checked_checkpoint(graph, quantizer, model.path)
    loader = Loader(checkpoint, quantizer, lowering, on_progress)
    with torch.inference_mode():
        return loader.load(own, max_len or graph.max_position)


class Loader:
    """One load: counts bytes, keeps what each sequence of ops runs on, and is the
    :class:`~engine.kernels.settings.Weights` that kernels are built from.

    ``used`` is given the names that are read; ``table``: the embedding that a tied head shares, where the graph has
    none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantizer: Quantizer,
        lowering: Lowering,
        on_progress: Progress | None = None,
        used: set[str] | None = None,
        table: tuple[str, Tensor] | None = None,
    ) -> None:
        self._used = set() if used is None else used
        self._checkpoint = checkpoint
        self._quantizer = quantizer
        self._names = checkpoint.names
        self._manifest = Manifest(quantizer, self._names)
        self.lowering = lowering
        self._on_progress = on_progress
        self._packer = Packer(quantizer, Target.of(lowering))
        self._packed: dict[LinearSpec, PackedLinear] = {}
        self.labels = Labels()
        self._held: dict[int, int] = {}
        """Bytes by storage: tied weights count once."""
        self._read = 0
        self._claimed: list[str] = []
        """Tensors of this block."""
        self.table = table
        """Name and tensor of the first embedding: what a tied head reads."""
        self._norms: dict[str, Tensor] = {}
        self._small: dict[str, Tensor] = {}
        self._kv_scales: list[tuple[Tensor, Tensor] | None] = []
        self._expert_counts: dict[int, Tensor] = {}

    def load(self, graph: Graph, max_len: int) -> LoweredModel:
        lowering = self.lowering
        self._read += unread_bytes(graph, self._checkpoint)
        embedding, *layers, head = fused_graph(graph, lowering)
        lowered_embedding, _ = self._block(graph.embed, embedding)
        lowered_layers = []
        for index, (block, found) in enumerate(zip(graph.layers, layers, strict=True)):
            lowered_layers.append(self.layer(block, found))
            self._report(f"layer {index + 1}/{len(graph.layers)}")
        lowered_head, greedy = self._block(graph.head, head)
        normed_head = self._normed_head(graph.head)
        own_head, first_token = _own_head(graph, lowered_head)
        self._report("head")
        return LoweredModel(
            graph=graph,
            embedding=lowered_embedding,
            layers=tuple(lowered_layers),
            head_block=lowered_head,
            normed_head=normed_head,
            rotate=lower_rotations(lowering, max_len),
            attention=lowering.attention,
            lowering=self.labels.lines(lowering),
            weights_bytes=sum(self._held.values()),
            own_head=own_head,
            first_token=first_token,
            dtype=lowering.dtype,
            device=lowering.device,
            on_triton=lowering.kernels == "triton",
            find_greedy=greedy,
            capturable=lowering.native and lowering.why_uncaptured is None,
            why_uncaptured=(lowering.why_uncaptured or "") if lowering.native else "",
            waits=self.labels.waits,
            kv_scales=tuple(self._kv_scales),
            notes=checkpoint_notes(graph, self._checkpoint),
            expert_counts=self._expert_counts,
        )

    def layer(self, block: Block, found: Sequence[Fused[Kernel]]) -> LoweredBlock:
        """One layer, and its scales of cached keys and values."""
        lowered, _ = self._block(block, found, in_layer=True)
        self._packed.clear()
        for node in block.nodes:
            if isinstance(node.op, KVWrite):
                self._kv_scales.append(self._scales_of(node.op, projection(block, node.inputs[0])))
            elif node.op.keeps_state:
                self._kv_scales.append(None)
        return lowered

    def outside(self, block: Block, found: Sequence[Fused[Kernel]]) -> LoweredBlock:
        """What is before the layers, or after them."""
        return self._block(block, found)[0]

    def single(self, op: Norm | Linear) -> Call:
        """One op by itself; a linear layer's parts one after another."""
        parts = len(op.spec.parts) if isinstance(op, Linear) else 1
        (found,) = fused_block(Block((Node(op, (0,), tuple(range(1, 1 + parts))),)), self.lowering)
        return found.kernel.lower(self.lowering, found, self).call

    def joined_norms(
        self, ops: tuple[Norm, Norm], embed: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """See :meth:`engine.contracts.drafter.DraftWeights.norms`."""
        if joins_norms(ops, self.lowering):
            from engine.kernels.triton.patterns import lower_joined_norms  # Triton is imported only where it runs

            return lower_joined_norms(self.lowering, ops, embed, self)
        of_embedding, of_hidden = (self.single(op) for op in ops)

        def joined(tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            normed = of_hidden(None, x)
            return cat((of_embedding(None, embed(tokens)), normed)), normed

        return joined

    def _block(
        self, block: Block, found: Sequence[Fused[Kernel]], in_layer: bool = False
    ) -> tuple[LoweredBlock, Greedy | None]:
        """A block's calls, and how its last one finds the most likely tokens."""
        self._claimed.clear()
        steps, labels, greedy = [], list[str](), None
        for fused in found:
            lowered = fused.kernel.lower(self.lowering, fused, self)
            self.labels.add(fused, lowered, in_layer)
            steps.append(_step(fused, lowered))
            labels.append(lowered.label)
            greedy = lowered.greedy
        return LoweredBlock(tuple(steps), block.residual, tuple(labels)), greedy if len(steps) == 1 else None

    def _normed_head(self, head: Block) -> LoweredBlock:
        """The head of rows that are normed already."""
        nodes = head.nodes[1:] if head.nodes and isinstance(head.nodes[0].op, Norm) else head.nodes
        found = fused_block(Block(nodes), self.lowering)
        return LoweredBlock(tuple(_step(fused, fused.kernel.lower(self.lowering, fused, self)) for fused in found))

    # Weights: what kernels ask for ------------------------------------------------------------------------------------

    def linear(self, spec: LinearSpec, *, tied: bool = False) -> PackedLinear:
        if spec not in self._packed:
            self._packed[spec] = self._pack(spec, tied)
        return self._packed[spec]

    def norm(self, op: Norm) -> Tensor:
        if op.name is None:
            return torch.ones(op.size, device=self.lowering.device)
        weight = self._norm_tensors(op)[f"{op.name}.weight"]
        return weight + op.offset if op.offset else weight

    def norm_bias(self, op: Norm) -> Tensor | None:
        return self._norm_tensors(op).get(f"{op.name}.bias")

    def experts(self, op: Experts) -> list[tuple[PackedLinear, PackedLinear]]:
        return [
            (self.pack_parts(up, of_up), self.pack_parts(down, of_down))
            for (up, of_up), (down, of_down) in self._expert_parts(op)
        ]

    def stacked_experts(self, op: Experts) -> tuple[PackedLinear, PackedLinear]:
        together = [list(one) for one in zip(*self._expert_parts(op), strict=True)]
        return tuple(self._stacked(experts) for experts in together)  # type: ignore[return-value]

    def expert_counts(self, op: CountExperts) -> Tensor:
        if op.layer not in self._expert_counts:
            counts = torch.zeros(op.num_experts, dtype=torch.int64, device=self.lowering.device)
            self._expert_counts[op.layer] = counts
        return self._expert_counts[op.layer]

    def _stacked(self, experts: Sequence[tuple[LinearSpec, Sequence[Mapping[str, Tensor]]]]) -> PackedLinear:
        spec = _together([spec for spec, _ in experts])
        return self.pack_parts(spec, [tensors for _, stored in experts for tensors in stored])

    def _expert_parts(self, op: Experts) -> Iterator[tuple[_Stored, _Stored]]:
        """Of each expert, gate and up, and down: layers and their tensors, which last as long as they are held."""
        if not self._manifest.are_together(op):
            return ((self._stored(up), self._stored(down)) for up, down in op.each)
        layers, single = self._manifest.experts(op), zip(*op.each, strict=True)
        up, down = (self._of_each(op, layer, specs) for layer, specs in zip(layers, single, strict=True))
        return zip(up, down, strict=True)

    def _of_each(self, op: Experts, layer: ManifestEntry, single: Sequence[LinearSpec]) -> list[_Stored]:
        """One layer of each expert, out of the tensors that hold those of all; unquantized ones part by part, as if
        they were stored so."""
        assert op.fused is not None and layer.spec is not None
        in_turns = op.fused.interleaved and is_pair(layer.spec)
        found: list[dict[str, Tensor]] = [{} for _ in range(op.num_experts)]
        for tensor in self._here(layer.tensors):
            assert tensor.stored is not None
            turned = op.fused.transposed and tensor.suffix == "weight"
            for mine, of_expert in zip(found, self._checkpoint.read(tensor.name, tensor.cuts), strict=True):
                one = of_expert.T if turned else of_expert
                mine[tensor.suffix] = (_halves(one, tensor.stored) if in_turns else one).contiguous()
        if not all(set(mine) <= {"weight", "bias"} for mine in found):
            return [(layer.spec, [mine]) for mine in found]
        return [(spec, _by_part(spec, mine)) for spec, mine in zip(single, found, strict=True)]

    def _stored(self, spec: LinearSpec) -> _Stored:
        return spec, self._parts(spec)

    def head_weights(self, op: HeadLinear) -> Tensor:
        if op.name not in self._small:
            spec = op.projection
            (stored,) = self._parts(spec)
            weight = stored["weight"] if set(stored) == {"weight"} else self._unpacked(spec, stored)
            self._small[op.name] = weight.to(device=self.lowering.device, dtype=self.lowering.dtype)
            self.hold(self._small[op.name])
        return self._small[op.name].view(op.num_heads, op.rows, op.features)

    def _unpacked(self, spec: LinearSpec, stored: Mapping[str, Tensor]) -> Tensor:
        name = spec.parts[0].name
        if not isinstance(self._quantizer, UnpackingQuantizer):
            raise CheckpointError(f"{name} is quantized, and {name_of(self._quantizer)} cannot unpack it")
        found = self._quantizer.unpacked(spec, stored)
        shape = (spec.out_features, spec.in_features)
        if not isinstance(found, Tensor) or found.dtype != torch.float32 or tuple(found.shape) != shape:
            raise contract_error(
                self._quantizer, "unpacked", f"returned {quote(found)}, expected float32 {list(shape)}"
            )
        return found

    def router(self, op: Router) -> tuple[Tensor, Tensor | None]:
        found = [self.small(name, shape) for name, shape in op.tensors]
        return found[0], found[1] if op.bias else None

    def small(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._small:
            self._small[name] = self.read(ManifestTensor(name, shape)).float().to(self.lowering.device)
            self.hold(self._small[name])
        return self._small[name]

    def embedding(self, op: Embed) -> Tensor:
        (tensor,) = as_they_are(Node(op, (), ())).tensors
        held = self.read(tensor).to(device=self.lowering.device, dtype=self.lowering.dtype)
        self.hold(held)
        if self.table is None:
            self.table = (tensor.name, held)
        return held

    def _norm_tensors(self, op: Norm) -> dict[str, Tensor]:
        tensors = list(as_they_are(Node(op, (), ())).tensors)
        for tensor in tensors:
            if tensor.name not in self._norms:
                self._norms[tensor.name] = self.read(tensor).float().to(self.lowering.device)
                self.hold(self._norms[tensor.name])
        return {tensor.name: self._norms[tensor.name] for tensor in tensors}

    # ------------------------------------------------------------------------------------------------------------------
    def _pack(self, spec: LinearSpec, tied: bool) -> PackedLinear:
        """``tied``: the weight is the embedding's."""
        parts: list[Mapping[str, Tensor]]
        if tied:
            assert self.table is not None, "a tied head after an embedding"
            name, mine = self.table
            mine = mine[: spec.out_features]  # there may be more embeddings than logits
            cut_of = f"as {self.lowering.dtype}, {_shown(spec, 0)}"
            origin = origin_of_tensor(name, self._checkpoint.entry(name), cut_of)
            parts = [StoredPart({"weight": lambda: mine}, origin)]
        else:
            parts = [*self._parts(spec)]
        return self.pack_parts(spec, parts)

    def pack_parts(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]]) -> PackedLinear:
        """``parts``: this rank's tensors."""
        try:
            packed = self._packer(spec, parts)
        except PluginError:
            # Numbers that are none make every product wrong: the quantizer is not to blame for them.
            check_finite(self._checkpoint, {*self._claimed, *(self.table[:1] if self.table else ())})
            raise
        for tensor in packed.tensors.values():
            self.hold(tensor)
        return packed

    def _scales_of(self, op: KVWrite, qkv: LinearSpec | None) -> tuple[Tensor, Tensor] | None:
        """The checkpoint's scales for this layer's cached keys and values: float32, one per KV head of this rank.
        ``qkv``: what the keys come from.

        ``None`` where there are none, or the cache's format has no place for them: they are then not even read.
        """
        if self.lowering.kv_format.scale != "per_layer_head" or qkv is None:
            return None
        names = self._manifest.kv_scale_names(qkv)
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

    def _kv_scale(self, names: Sequence[str], op: KVWrite) -> Tensor | None:
        name = next((name for name in names if name in self._names), None)
        if name is None:
            return None
        stored = self.read(ManifestTensor(name, None))
        scale = stored.flatten().float()
        heads = op.heads or Cut(0, op.num_kv_heads, op.num_kv_heads)
        if scale.numel() not in (1, heads.whole):
            raise CheckpointError(f"{name} has shape {list(stored.shape)}, expected one scale or {heads.whole}")
        if not stored.is_floating_point():
            raise CheckpointError(f"{name} is {stored.dtype}, expected a floating-point number; {_WITHOUT_SCALES}")
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise CheckpointError(f"{name} holds {scale.tolist()}: a scale is a positive number; {_WITHOUT_SCALES}")
        mine = scale.expand(heads.whole)[heads.start : heads.stop].contiguous().to(self.lowering.device)
        self.hold(mine)
        return mine

    def _parts(self, spec: LinearSpec) -> list[StoredPart]:
        """By part, this rank's share of its tensors, by suffix."""
        return [self._part(tensors, _shown(spec, i)) for i, tensors in enumerate(self._manifest.linear(spec).parts)]

    def _part(self, tensors: Sequence[ManifestTensor], share: str) -> StoredPart:
        here = list(self._here(tensors))
        readers = {tensor.suffix: partial(self._checkpoint.read, tensor.name, tensor.cuts) for tensor in here}
        origins = [origin_of_tensor(tensor.name, self._checkpoint.entry(tensor.name), share) for tensor in here]
        return StoredPart(readers, joined_origins(origins))

    def _here(self, tensors: Iterable[ManifestTensor]) -> Iterator[ManifestTensor]:
        """Those that the checkpoint has and this rank reads."""
        for tensor in tensors:
            if tensor.name in self._names:
                self._claim(tensor)
                if tensor.is_read:
                    yield tensor

    def read(self, tensor: ManifestTensor) -> Tensor:
        """As stored: what this rank has of it."""
        self._claim(tensor)
        return self._checkpoint.read(tensor.name, tensor.cuts)

    def _claim(self, tensor: ManifestTensor) -> None:
        """Count a tensor as used and check its shape."""
        entry = self._checkpoint.entry(tensor.name)
        if tensor.shape is not None:
            check_shape(entry, tensor.name, tensor.shape)
        self._read += entry.num_bytes
        self._used.add(tensor.name)
        self._claimed.append(tensor.name)

    def hold(self, tensor: Tensor) -> None:
        self._held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def _report(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(min(1.0, self._read / max(1, self._checkpoint.num_bytes)), what)


def _together(experts: Sequence[LinearSpec]) -> LinearSpec:
    """One layer of all experts as one layer, their parts one after another."""
    parts = tuple(part for spec in experts for part in spec.parts)
    share = experts[0].share
    if share is not None:
        whole = _together([spec.whole for spec in experts])
        rows = tuple(ranges for spec in experts if spec.share is not None for ranges in spec.share.rows)
        share = replace(share, whole=whole, rows=rows)
    return replace(experts[0], parts=parts, kind="body", share=share)


def _own_head(graph: Graph, head: LoweredBlock) -> tuple[LoweredBlock | None, int]:
    """Of a head that ends by gathering logits: what comes before that, and the first token of this rank."""
    if not graph.head.nodes or not isinstance(graph.head.nodes[-1].op, AllGather):
        return None, 0
    share = graph.lm_head.spec.share
    assert share is not None
    return replace(head, steps=head.steps[:-1]), share.rows[0][0][0]


def _shown(spec: LinearSpec, part: int) -> str:
    """What this rank has of a part."""
    share = spec.share
    if share is None:
        return "all"
    return f"out {share.rows[part]}" if share.columns is None else f"in {share.columns}"


def _halves(in_turns: Tensor, stored: StoredTensor) -> Tensor:
    """Gates and then ups, which alternate."""
    axis = stored.shard_axes.get("out")
    if axis is None:
        return in_turns
    before, after = in_turns.shape[:axis], in_turns.shape[axis + 1 :]
    pairs = in_turns.reshape(*before, -1, 2, *after)
    return pairs.transpose(axis, axis + 1).reshape(in_turns.shape)


def _by_part(spec: LinearSpec, whole: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
    """Tensors of all parts of a layer, outputs first, as those of each."""
    sizes = [part.out_features for part in spec.parts]
    cuts = {suffix: torch.split(tensor, sizes) for suffix, tensor in whole.items()}
    return [{suffix: cut[i] for suffix, cut in cuts.items()} for i in range(len(sizes))]


def _step(fused: Fused[Kernel], lowered: Lowered) -> Step:
    written = next((node.cache for node in fused.nodes if isinstance(node.op, KVWrite)), None)
    return Step(lowered.call, fused.inputs, fused.outputs, tuple(fused.last_use), written)
