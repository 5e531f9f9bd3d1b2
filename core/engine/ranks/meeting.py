"""Whether ranks that will exchange tensors can: every two of them do it once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch

from engine.contracts.communicator import Communicator, CommunicatorError
from engine.models.layout import Layout
from engine.ranks.steps import RankStatus


def pairs(layout: Layout) -> Iterator[tuple[int, int]]:
    """Ranks of one stage, and those that hand over from stage to stage, in an order that is the same on all ranks."""
    for stage in range(layout.pp):
        yield from combinations(range(stage * layout.stage_size, (stage + 1) * layout.stage_size), 2)
    for rank in range(layout.size):
        after = layout.after(rank)
        if after is not None:
            yield rank, after


def check_pairs(communicator: Communicator, layout: Layout, rank: int, device: str, status: RankStatus) -> None:
    """A few bytes from each rank of a pair to the other. Raises :class:`CommunicatorError` naming the pair."""
    for pair in pairs(layout):
        if rank not in pair:
            continue
        first, second = pair
        other = second if rank == first else first
        status.doing = f"trying ranks {first} and {second}"
        ours, theirs = torch.tensor([rank], device=device), torch.tensor([-1], device=device)
        try:
            if rank == first:
                communicator.send(ours, other)
                communicator.recv(theirs, other)
            else:
                communicator.recv(theirs, other)
                communicator.send(ours, other)
        except CommunicatorError as error:
            raise CommunicatorError(f"ranks {first} and {second} do not reach each other: {error}", pair) from error
        if int(theirs) != other:
            raise CommunicatorError(f"rank {rank} got {int(theirs)} from rank {other}, expected {other}", pair)
