"""What the communicators share: the checks of a call, what they say of ranks that do not come, sums in rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.contracts.communicator import CommunicatorError, World

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are added up."""


def ranks_of(world: World, group: str) -> tuple[int, ...]:
    """Raises ``ValueError`` for a group that this rank is not in."""
    ranks = world.groups.get(group)
    if ranks is None:
        raise ValueError(f"rank {world.rank} is in no group {group!r}: expected one of {', '.join(world.groups)}")
    return ranks


def check_sum(x: Tensor) -> None:
    """Raises ``TypeError`` for a dtype that is not added up."""
    if x.dtype not in SUMMED:
        expected = " or ".join(str(dtype) for dtype in SUMMED)
        raise TypeError(f"a sum over ranks of {x.dtype}: expected {expected}")


def check_counts(x: Tensor, counts: Sequence[int], ranks: Sequence[int]) -> None:
    """Raises ``ValueError`` where the rows of ``x`` are not those of ``counts``."""
    if len(counts) != len(ranks) or min(counts) < 0 or sum(counts) != x.shape[0]:
        raise ValueError(f"reduce_scatter of {x.shape[0]} rows over {len(ranks)} ranks: counts are {list(counts)}")


def check_parts(parts: Sequence[Tensor], ranks: Sequence[int], what: str) -> None:
    """Raises ``ValueError`` where there is not one part for each rank."""
    if len(parts) != len(ranks):
        raise ValueError(f"{what}: {len(parts)} parts for {len(ranks)} ranks")


def check_source(source: int, ranks: Sequence[int], group: str) -> None:
    """Raises ``ValueError`` for a source that is not in the group."""
    if source not in ranks:
        raise ValueError(f"broadcast from rank {source}: group {group} has the ranks {', '.join(map(str, ranks))}")


def check_peer(world: World, rank: int, call: str) -> None:
    """Raises ``ValueError`` for a rank that there is not, and for this one."""
    if not 0 <= rank < world.size or rank == world.rank:
        raise ValueError(f"rank {world.rank}: {call} rank {rank} of {world.size}")


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one part a rank, in float32: ``((first + second) + third) + ...``"""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def seconds(timeout_s: float) -> str:
    return f"{timeout_s:g} s"


def late(entered: str, timeout_s: float, seen: Mapping[int, str]) -> CommunicatorError:
    """``entered``: ``rank 0 entered all_reduce of group tp (call 5)``; ``seen``: where each rank that did not come is,
    ``is at call 4``."""
    others = "; ".join(f"rank {rank} {place}" for rank, place in sorted(seen.items()))
    return CommunicatorError(f"{entered} and waited {seconds(timeout_s)}: {others}", sorted(seen))


def not_come(world: World, ranks: Sequence[int]) -> CommunicatorError:
    """Of a start."""
    named = ", ".join(f"rank {rank}" for rank in sorted(ranks))
    return CommunicatorError(
        f"rank {world.rank} waited {seconds(world.timeout_s)}: {named} did not come", sorted(ranks)
    )
