"""What ranks exchange, by the plan's communicator: of tensors, or of the values of a program."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.communicator import Communicator, NativeCommunicator
from engine.contracts.ops import AllGather, AllReduce, GatherTokens, HeldExperts, OwnExperts, SumTokens
from engine.kernels.context import StepContext
from engine.kernels.cpu.program import NotNative, Value, run
from engine.kernels.settings import Kernel, Lowered, Lowering, Weights
from engine.models.fuse import Fused

GROUP, STAGE = "tp", "stage"


def lower_all_reduce(lowering: Lowering, op: AllReduce, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """In place: a summand is read by nobody else."""
    collectives = _collectives(lowering)

    def reduce(context: StepContext | None, x: Tensor) -> Tensor:
        return _sum(collectives, x, GROUP)

    return Lowered(reduce, "sum over ranks", _why_not_native(collectives))


def lower_gather_tokens(lowering: Lowering, op: GatherTokens, fused: Fused[Kernel], weights: Weights) -> Lowered:
    def gather(context: StepContext, x: Tensor) -> Tensor:
        return x if context.dealt is None else context.dealt.gathered(x)

    return Lowered(gather, "tokens gathered from ranks")


def lower_sum_tokens(lowering: Lowering, op: SumTokens, fused: Fused[Kernel], weights: Weights) -> Lowered:
    """In place: a summand is read by nobody else."""
    collectives = _collectives(lowering)

    def reduce(context: StepContext, x: Tensor) -> Tensor:
        if context.dealt is None:
            return _sum(collectives, x, STAGE)
        return _sum(collectives, context.dealt.summed(x), GROUP)

    return Lowered(reduce, "sum over ranks", _why_not_native(collectives))


def _sum(collectives: Communicator, x: Tensor, group: str) -> Tensor:
    """In place."""
    if not isinstance(x, Value):
        return collectives.all_reduce(x.contiguous(), group)
    if not isinstance(collectives, NativeCommunicator):
        raise NotNative(_why_not_native(collectives) or "")
    run(lambda x: collectives.all_reduce_call(x, group), x)
    return x


def _why_not_native(collectives: Communicator) -> str | None:
    return None if isinstance(collectives, NativeCommunicator) else "the communicator has no native calls"


def lower_all_gather(lowering: Lowering, op: AllGather, fused: Fused[Kernel], weights: Weights) -> Lowered:
    collectives = _collectives(lowering)
    ends = [stop for _, stop in op.shares]
    apart = [start for start, _ in op.shares] == [0, *ends[:-1]]

    def gather(context: StepContext | None, x: Tensor) -> Tensor:
        if isinstance(x, Value):
            raise NotNative("ranks gather what each has a part of")
        parts = [x.new_empty(x.shape[0], stop - start) for start, stop in op.shares]
        collectives.all_gather(x.contiguous(), op.group, parts)
        if apart:
            return torch.cat(parts, dim=1)
        whole = x.new_empty(x.shape[0], op.size)
        for (start, stop), part in zip(op.shares, parts, strict=True):
            whole[:, start:stop] = part
        return whole

    return Lowered(gather, "gathered from ranks", "ranks gather what each has a part of")


def own_ids(held: HeldExperts, device: str) -> Tensor:
    """int64 ``[whole]``: of each expert, the id that it has among those of a rank; -1 for another rank's."""
    found = torch.full((held.whole,), -1, device=device)
    found[list(held.numbers)] = torch.arange(len(held.numbers), device=device)
    return found


def lower_own_experts(lowering: Lowering, op: OwnExperts, fused: Fused[Kernel], weights: Weights) -> Lowered:
    here = own_ids(op.held, lowering.device)

    def own(context: StepContext | None, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(ids, Value):
            raise NotNative("torch finds a rank's own experts")
        return here[ids], shares

    return Lowered(own, "torch", "torch finds a rank's own experts")


def _collectives(lowering: Lowering) -> Communicator:
    assert lowering.collectives is not None, "a graph of one rank exchanges nothing"
    return lowering.collectives
