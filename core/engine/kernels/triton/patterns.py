"""Sequences of ops on the Triton kernels: one launch each for few rows, torch's products and one kernel between them
for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.ops import Experts, LinearSpec, Norm
from engine.kernels.context import StepContext
from engine.kernels.cpu.row_ops import Table
from engine.kernels.linear import PackedLinear
from engine.kernels.patterns import (
    ChooseExperts,
    GateUp,
    LinearAdd,
    MixExperts,
    NormHead,
    NormMixture,
    QKVWrite,
    choose_experts,
    choose_own_experts,
    gate_up,
    linear_add,
    mix_experts,
    norm_head,
    norm_mixture,
    qkv_write,
)
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights
from engine.kernels.torch.collectives import own_ids
from engine.kernels.torch.ops import norm_label, torch_norm
from engine.kernels.torch.patterns import lower_linear_add
from engine.kernels.triton.joined_norms import joined_norms
from engine.kernels.triton.launch import (
    HeadShape,
    HeadWriter,
    Launch,
    NormWeight,
    SkinnyLinear,
    argmax_rows,
    gated_activation,
    quantized_rows,
)
from engine.kernels.triton.mixture import Mixture
from engine.kernels.triton.routing import MOST_EXPERTS, ExpertChoice
from engine.kernels.triton.tiles import MAX_ROWS
from engine.models.fuse import Fused

ACTS = ("silu", "gelu_tanh")


def triton_kernels() -> tuple[Kernel, ...]:
    """What runs on a GPU, and in Triton's interpreter, where it suits."""
    return (
        Kernel(qkv_write, lower_qkv_write, _writes_inline),
        Kernel(gate_up, lower_gate_up, lambda lowering, what: what.norm.kind == "rms" and what.act in ACTS),
        Kernel(linear_add, lower_add),
        Kernel(norm_head, lower_head, lambda lowering, what: what.norm.kind == "rms"),
        Kernel(norm_mixture, lower_norm_mixture, _norms_and_mixes),
        Kernel(choose_experts, lower_choose, _chooses),
        Kernel(choose_own_experts, lower_choose, _chooses),
        Kernel(mix_experts, lower_mix),
    )


@dataclass(frozen=True, slots=True)
class FewRows:
    """The fused kernel of a sequence and the numbers of rows it serves, ``rows[0]`` to ``rows[1]``."""

    linear: SkinnyLinear
    rows: tuple[int, int]

    def serves(self, x: Tensor) -> bool:
        return self.rows[0] <= x.shape[0] <= self.rows[1]


def served_rows(packed: PackedLinear) -> tuple[int, int] | None:
    """Numbers of rows for which a layer's fused kernel is used, first and last; ``None`` if it has none."""
    return None if packed.tile_loader is None else (1, MAX_ROWS)


def _writes_inline(lowering: Lowering, what: QKVWrite) -> bool:
    """Whether kernels can store this cache format themselves, and norm as these do."""
    norms = (what.norm, what.q_norm, what.k_norm)
    rms = all(norm is None or norm.kind == "rms" for norm in norms)
    stored = lowering.kv_format.scale == "none" or lowering.kv_format.store_tile() is not None
    return rms and stored and what.head_dim % 2 == 0


def needs_whole_heads(lowering: Lowering, what: QKVWrite) -> bool:
    """Whether something is computed over a head: its norm, or the scale it is stored with."""
    normed = what.q_norm is not None or what.k_norm is not None
    return normed or lowering.kv_format.scale == "per_token_head"


def lower_qkv_write(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: QKVWrite = fused.what
    packed = weights.linear(what.qkv)
    norm = None if what.norm is None else _norm_weight(lowering, what.norm, weights)
    few = _few_rows(lowering, what.qkv, packed, norm)
    normed_linear = packed.apply if what.norm is None else _many_rows(lowering, what.norm, packed, weights)
    heads = HeadShape(what.num_heads, what.num_kv_heads, what.head_dim, what.rotary_dim)
    of_heads = (None if op is None else _norm_weight(lowering, op, weights) for op in (what.q_norm, what.k_norm))
    write = HeadWriter(Launch.on(lowering.device), heads, *of_heads)
    rotation = None if what.rope is None else lowering.rotations.index(what.rope)
    in_two, index = needs_whole_heads(lowering, what), lowering.first_cache + what.cache

    def qkv_rope_write(context: StepContext, x: Tensor) -> Tensor:
        tables = None if rotation is None else context.rotations[rotation]
        cache = context.kv.layers[index]
        slots = context.slot_mappings[cache.group]
        if few is None or not few.serves(x):
            return write(normed_linear(x), tables, slots, cache).flatten(1)
        if in_two:
            return write(few.linear.store(x), tables, slots, cache).flatten(1)
        return few.linear.rope_write(x, heads, tables, slots, cache).flatten(1)

    rotated = "" if rotation is None else "rotation, "
    normed = "" if norm is None else "norm, "
    product = (
        f"two Triton kernels: {normed}product; whole heads, " if in_two else f"one Triton kernel: {normed}product, "
    )
    before = "" if norm is None else f"{norm_label(lowering)}, "
    chain = f"{before}{packed.label}, Triton {'' if rotation is None else 'rotation and '}KV write"
    return Lowered(qkv_rope_write, _by_rows(f"{product}{rotated}KV write", packed, chain))


def lower_gate_up(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: GateUp = fused.what
    packed, act = weights.linear(what.gate_up), what.act
    few = _few_rows(lowering, what.gate_up, packed, _norm_weight(lowering, what.norm, weights))
    normed_linear = _many_rows(lowering, what.norm, packed, weights)
    launch = Launch.on(lowering.device)

    def gated(context: StepContext, x: Tensor) -> Tensor:
        if few is not None and few.serves(x):
            return few.linear.gate(x, act)
        return gated_activation(normed_linear(x), act, launch)

    chain = f"{norm_label(lowering)}, {packed.label}, Triton gate"
    return Lowered(gated, _by_rows("one Triton kernel: norm, product, gate", packed, chain))


def lower_add(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: LinearAdd = fused.what
    packed, many = weights.linear(what.linear), lower_linear_add(lowering, fused, weights)
    few, overwrites = _few_rows(lowering, what.linear, packed, None), fused.inputs[1] in fused.last_use
    if few is None:
        return Lowered(many.call, _by_rows("", packed, many.label))

    def add(context: StepContext, x: Tensor, residual: Tensor) -> Tensor:
        if not few.serves(x):
            made: Tensor = many.call(context, x, residual)
            return made
        return few.linear.add(x, residual) if overwrites else residual + few.linear.store(x)

    kernel = "one Triton kernel: product, add" if overwrites else "Triton product, add"
    return Lowered(add, _by_rows(kernel, packed, many.label))


def lower_head(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """``greedy`` finds the tokens in the kernel that has the logits."""
    what: NormHead = fused.what
    packed = weights.linear(what.head.spec, tied=what.head.tied)
    norm, linear = torch_norm(lowering, what.norm, weights), packed.apply
    few = _few_rows(lowering, what.head.spec, packed, _norm_weight(lowering, what.norm, weights))
    launch = Launch.on(lowering.device)

    def project(context: StepContext | None, hidden: Tensor) -> Tensor:
        if few is not None and few.serves(hidden):
            return few.linear.logits(hidden)[0]
        return linear(norm(hidden)).float()

    def greedy(hidden: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        if few is not None and few.serves(hidden):
            logits, tokens = few.linear.logits(hidden, greedy=True, out=out)
            assert tokens is not None
            return logits, tokens
        made = linear(norm(hidden))
        logits = made.float().contiguous() if out is None else out.copy_(made)
        return logits, argmax_rows(logits, launch)

    chain = f"{norm_label(lowering)}, {packed.label}"
    return Lowered(project, _by_rows("one Triton kernel: norm, product", packed, chain), greedy=greedy)


def lower_choose(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    choose = _choice(lowering, fused.what, weights)
    label = f"1 to {MAX_ROWS} rows: one Triton kernel: float32 product, choice; else: float32 F.linear, Triton choice"
    return Lowered(lambda context, x: choose(x), label)


def _choice(lowering: Lowering, what: ChooseExperts, weights: Weights) -> ExpertChoice:
    op, device = what.route, lowering.device
    names, shape = (op.correction, op.expert_scale), (op.num_experts,)
    correction, scale = (None if name is None else weights.small(name, shape) for name in names)
    own = None if what.held is None else own_ids(what.held, device)
    arrived = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    return ExpertChoice(Launch.on(device), op, *weights.router(what.router), correction, arrived, scale, own)


def _chooses(lowering: Lowering, what: ChooseExperts) -> bool:
    return what.route.num_experts <= MOST_EXPERTS


def _norms_and_mixes(lowering: Lowering, what: NormMixture) -> bool:
    # Weights multiply what is normed: experts that read weighted inputs cannot norm them.
    few = _chooses(lowering, what.choose) and not what.experts.weighs_inputs
    return few and what.norm.kind == "rms" and not what.norm.by_head


def lower_mix(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: MixExperts = fused.what
    mixture, label = _mixture(lowering, what.experts, weights)
    overwrites = what.adds and fused.inputs[3] in fused.last_use

    def mix(context: StepContext, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None = None) -> Tensor:
        return mixture(x, ids, shares, residual, overwrites)

    return Lowered(mix, label)


def lower_norm_mixture(lowering: Lowering, fused: Fused[Kernel], weights: Weights) -> Lowered:
    what: NormMixture = fused.what
    choose, (mixture, label) = _choice(lowering, what.choose, weights), _mixture(lowering, what.experts, weights)
    norm, norm_weight = torch_norm(lowering, what.norm, weights), _norm_weight(lowering, what.norm, weights)
    overwrites = fused.inputs[0] in fused.last_use

    def mix(context: StepContext, x: Tensor) -> Tensor:
        if x.shape[0] <= MAX_ROWS:
            return mixture(x, *choose.of_few(x, norm_weight), x, overwrites, norm_weight)
        normed = norm(x)
        return mixture(normed, *choose(normed), x, overwrites)

    few = f"1 to {MAX_ROWS} rows: norms in the Triton kernels of choice and gate; else: {norm_label(lowering)}"
    return Lowered(mix, f"{few}; {label}")


def _mixture(lowering: Lowering, op: Experts, weights: Weights) -> tuple[Mixture, str]:
    """All experts of a layer are one weight: an expert is a range of its rows. And a label."""
    gate_up, down = weights.stacked_experts(op)
    if gate_up.tile_loader is None or down.tile_loader is None:
        raise ValueError(f"experts of {gate_up.label}: no tile loader, which execution={'{compile,graphs}'} needs")
    mixture = Mixture(
        Launch.on(lowering.device), op.num_experts, op.top_k, op.gate_up.in_features, op.down.in_features,
        op.down.out_features, gate_up.tile_loader, down.tile_loader, op.gated, op.weighs_inputs, op.held,
    )  # fmt: skip
    pairs = "Triton kernels: gate, mix; many pairs sorted by expert"
    return mixture, f"{op.num_experts} experts, {op.top_k} a token: {pairs} ({gate_up.label})"


def _by_rows(kernel: str, packed: PackedLinear, chain: str) -> str:
    rows = served_rows(packed)
    if rows is None:
        return f"unfused (weights: no tile loader): {chain}"
    return f"{rows[0]} to {rows[1]} rows: {kernel}; else: {chain}"


def _few_rows(lowering: Lowering, spec: LinearSpec, packed: PackedLinear, norm: NormWeight | None) -> FewRows | None:
    rows = served_rows(packed)
    if rows is None or packed.tile_loader is None:
        return None
    launch = Launch.on(lowering.device)
    return FewRows(SkinnyLinear(launch, packed.tile_loader, spec.in_features, spec.out_features, norm), rows)


def _many_rows(lowering: Lowering, op: Norm, packed: PackedLinear, weights: Weights) -> Callable[[Tensor], Tensor]:
    """Norm and product, for any number of rows; a layer that takes its input in 8 bits gets it so from the norm."""
    norm, linear = torch_norm(lowering, op, weights), packed.apply
    kind, apply_quantized = packed.input_quant, packed.apply_quantized
    if kind is None or apply_quantized is None:
        return lambda x: linear(norm(x))
    weight, launch = _norm_weight(lowering, op, weights), Launch.on(lowering.device)

    def rounded(x: Tensor) -> Tensor:
        if x.shape[0] <= MAX_ROWS:
            return linear(norm(x))
        return apply_quantized(*quantized_rows(x, weight, kind, launch), x.dtype)

    return rounded


def _norm_weight(lowering: Lowering, op: Norm, weights: Weights) -> NormWeight:
    weight = weights.norm(op)
    narrow = weight.to(lowering.dtype)
    # Every program reads all of it: half the bytes where they lose nothing, as with weights stored in 16 bits.
    return NormWeight(narrow if torch.equal(narrow.float(), weight) else weight, op.eps)


def lower_joined_norms(
    lowering: Lowering, ops: tuple[Norm, Norm], embed: Callable[[Tensor], Tensor], weights: Weights
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """See :meth:`engine.contracts.drafter.DraftWeights.norms`."""
    of_table, of_x = (_norm_weight(lowering, op, weights) for op in ops)
    table, launch = embed.rows if isinstance(embed, Table) else None, Launch.on(lowering.device)

    def joined(tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if table is None:
            return joined_norms(None, embed(tokens), x, (of_table, of_x), launch)
        return joined_norms(tokens, table, x, (of_table, of_x), launch)

    return joined
