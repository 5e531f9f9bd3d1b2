"""Ops that keep a state, in torch: all rows of a step at once, and no look at lengths that the device alone knows.

What earlier tokens left lies in the cache by position, as keys do: numbers of each token, and the state after each
full block. A step reads what the tokens of its first block left, and the state after the block before. Nothing is
undone when drafts are rejected, for their positions are computed again, and a prefix is found as that of attention is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.ops import DeltaRule, ShortConv
from engine.kernels.context import StepContext
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights, cache_of
from engine.kernels.torch.reference import activated
from engine.models.fuse import Fused

LENGTH_EPS = 1e-6
"""Added to the square of the length of a query or key."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the tokens of a step are."""

    batch: AttentionBatch
    starts: Tensor
    """int64 ``[num_rows]``: position of each row's first token."""
    ends: Tensor
    """Of the one after its last."""

    @staticmethod
    def of(batch: AttentionBatch) -> Rows:
        ends = batch.kv_lens_device.long()
        return Rows(batch, ends - batch.q_starts.diff(), ends)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Of positions of rows, which must not be negative."""
        size, tables = self.batch.block_size, self.batch.block_tables
        blocks = (positions // size).clamp_(max=tables.shape[1] - 1)
        return tables[rows, blocks].long() * size + positions % size


def lower_short_conv(lowering: Lowering, op: ShortConv, fused: Fused[Kernel], weights: Weights) -> Lowered:
    index = cache_of(lowering, fused.nodes[0])
    taps = weights.small(f"{op.name}.weight", (op.features, 1, op.kernel))[:, 0].T.contiguous()  # the oldest first

    def convolved(context: StepContext, *inputs: Tensor) -> tuple[Tensor, ...]:
        group, kept = context.kv.group_of[index], context.kv.states[index].tokens.flatten(0, 1)
        x, rows = torch.cat(inputs, dim=1).float(), Rows.of(context.batches[group])
        tokens = torch.arange(len(x), device=x.device)
        row = torch.searchsorted(rows.batch.q_starts[1:].contiguous(), tokens.int(), right=True)
        row = row.clamp_(max=len(rows.starts) - 1)
        y = x * taps[-1]
        for back in range(1, op.kernel):
            at = context.positions - back
            before = torch.where((at >= 0)[:, None], kept[rows.slots(row, at.clamp(min=0))], 0.0)
            here = (at >= rows.starts[row])[:, None]
            y += taps[-1 - back] * torch.where(here, x[(tokens - back).clamp(min=0)], before)
        kept.index_copy_(0, context.slots(index), x)
        made = activated(y, op.act).to(inputs[0].dtype)
        return torch.split(made, [each.shape[1] for each in inputs], dim=1)

    return Lowered(convolved, "torch")


def lower_delta_rule(lowering: Lowering, op: DeltaRule, fused: Fused[Kernel], weights: Weights) -> Lowered:
    index = cache_of(lowering, fused.nodes[0])
    rate, bias = (weights.small(name, (op.num_heads,)) for name in (op.rate, op.bias))

    def delta_rule(context: StepContext, q: Tensor, k: Tensor, v: Tensor, write: Tensor, decay: Tensor) -> Tensor:
        tokens = _Tokens(
            _unit(q, op) * op.key_dim**-0.5,
            _unit(k, op),
            v.float().view(-1, op.num_heads, op.value_dim),
            write.float().sigmoid(),
            -rate.exp() * F.softplus(decay.float() + bias),
        )
        cache, batch = context.kv.states[index], context.batches[context.kv.group_of[index]]
        return _block_by_block(op, Rows.of(batch), tokens, cache.tokens, cache.states).to(v.dtype)

    return Lowered(delta_rule, "torch, block by block")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A step's, float32."""

    q: Tensor
    """``[num_tokens, num_key_heads, key_dim]``, as ``k``."""
    k: Tensor
    v: Tensor
    """``[num_tokens, num_heads, value_dim]``"""
    strength: Tensor
    """``[num_tokens, num_heads]``: how much of a value is written."""
    decay: Tensor
    """As ``strength``, the logarithm."""


def _unit(x: Tensor, op: DeltaRule) -> Tensor:
    heads = x.float().view(-1, op.num_key_heads, op.key_dim)
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)


def _block_by_block(op: DeltaRule, rows: Rows, tokens: _Tokens, kept: Tensor, states: Tensor) -> Tensor:
    """``kept [num_blocks, block_size, ...]``: of each token its key, what it wrote and its decay; ``states [num_blocks,
    ...]``. All rows compute their first block, then those with more tokens their next."""
    size, count, device = rows.batch.block_size, len(tokens.q), kept.device
    out = kept.new_empty(count + 1, op.num_heads * op.value_dim)  # the last is nobody's
    blocks_of = [(q_len + size - 2) // size + 1 for q_len in rows.batch.q_lens]  # at most
    chosen = torch.arange(len(blocks_of), device=device)
    first, state = rows.starts // size, None
    for step in range(max(blocks_of)):
        if step:
            on = [place for place, most in enumerate(blocks_of) if most > step]
            blocks_of = [blocks_of[place] for place in on]
            if len(on) < len(chosen):
                at = torch.tensor(on, device=device)
                chosen, state = chosen[at], None if state is None else state[at]
        block = first[chosen] + step
        state = _state_before(op, rows, chosen, block, states) if state is None else state
        state = _one_block(op, rows, tokens, chosen, block, state, out, kept, states)
    return out[:count]


def _state_before(op: DeltaRule, rows: Rows, chosen: Tensor, block: Tensor, states: Tensor) -> Tensor:
    """``[rows, num_heads, key_dim, value_dim]`` after the block before; 0 where there is none."""
    before = rows.slots(chosen, (block - 1).clamp(min=0) * rows.batch.block_size) // rows.batch.block_size
    found = torch.where((block > 0)[:, None], states[before], 0.0)
    return found.view(-1, op.num_heads, op.key_dim, op.value_dim)


def _one_block(
    op: DeltaRule,
    rows: Rows,
    tokens: _Tokens,
    chosen: Tensor,
    block: Tensor,
    state: Tensor,
    out: Tensor,
    kept: Tensor,
    states: Tensor,
) -> Tensor:
    """One block of each chosen row, from the ``state`` before it; returns the one after it.

    The chunked form of the paper: what the tokens of a block write solves a triangular system, in which those that
    were computed in earlier steps are known.
    """
    size, groups = rows.batch.block_size, op.num_heads // op.num_key_heads
    at = block[:, None] * size + torch.arange(size, device=kept.device)  # [rows, size]
    start, end = rows.starts[chosen][:, None], rows.ends[chosen][:, None]
    old, new = at < start, (at >= start) & (at < end)
    token = (rows.batch.q_starts[chosen].long()[:, None] + at - start).clamp_(0, len(tokens.q) - 1)
    slots = rows.slots(chosen[:, None].expand_as(at), at)
    of_heads = [op.num_key_heads * op.key_dim, op.num_heads * op.value_dim, op.num_heads]
    old_k, old_written, old_decay = torch.split(kept.flatten(0, 1)[slots], of_heads, dim=-1)

    def merged(ours: Tensor, theirs: Tensor) -> Tensor:
        """``[rows, heads, size, ...]`` of the step's tokens, of earlier ones, and 0 of later ones."""
        shape = (*at.shape, *(1 for _ in ours.shape[1:]))
        known = torch.where(old.view(shape), theirs.reshape(*at.shape, *ours.shape[1:]), 0.0)
        return torch.where(new.view(shape), ours[token], known).transpose(1, 2)

    def own(ours: Tensor) -> Tensor:
        """Of the step's tokens, and 0: what another row's are must not come near."""
        return torch.where(new.view(*at.shape, *(1 for _ in ours.shape[1:])), ours[token], 0.0).transpose(1, 2)

    k_heads = merged(tokens.k, old_k)
    k, q = (each.repeat_interleave(groups, dim=1) for each in (k_heads, own(tokens.q)))
    decay = merged(tokens.decay, old_decay)
    total = decay.cumsum(dim=-1)
    later = torch.ones(size, size, dtype=torch.bool, device=kept.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    strength = own(tokens.strength)[..., None]
    fades = total.exp()[..., None]
    wanted = strength * (own(tokens.v) - fades * (k @ state))
    earlier = torch.where(old[..., None], old_written, 0.0).view(*at.shape, op.num_heads, op.value_dim).transpose(1, 2)
    system = strength * between * (k @ k.transpose(-1, -2))
    written = torch.linalg.solve_triangular(system, wanted + earlier, upper=False, unitriangular=True)
    made = fades * (q @ state) + (between * (q @ k.transpose(-1, -2))) @ written
    after: Tensor = fades[:, :, -1:] * state + (k * between[:, :, -1, :, None]).transpose(-1, -2) @ written

    # Padding takes what is nobody's: all writes have fixed shapes.
    out.index_copy_(0, torch.where(new, token, len(out) - 1).flatten(), made.transpose(1, 2).flatten(2).flatten(0, 1))
    left = torch.cat([each.transpose(1, 2).flatten(2) for each in (k_heads, written)] + [decay.transpose(1, 2)], dim=-1)
    kept.flatten(0, 1).index_copy_(0, torch.where(new, slots, 0).flatten(), left.flatten(0, 1))
    full = torch.where(new[:, -1], slots[:, -1] // size, 0)
    states.index_copy_(0, full, after.flatten(1))
    return after
