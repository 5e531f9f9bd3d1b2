"""One device: every collective has one participant."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from engine.contracts.config import SlotConfig
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
GROUPS = ("tp", "pp", "ep", "sp")


class SingleDevice:
    """Slot ``parallelism`` on one rank: nothing is cut and nothing is sent.

    A collective over one rank returns what that rank put in. Unknown group names raise ``ValueError``, so that a
    slip shows here and not only on many devices.
    """

    rank: int = 0
    world_size: int = 1

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def shard(self, spec: LinearSpec) -> tuple[int, int]:
        """Always ``(0, 1)``: the whole tensor."""
        return 0, 1

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        return _of_one_rank(x, group)

    def all_gather(self, x: Tensor, group: str, axis: int) -> Tensor:
        return _of_one_rank(x, group)

    def reduce_scatter(self, x: Tensor, group: str, axis: int) -> Tensor:
        return _of_one_rank(x, group)

    def all_to_all(self, x: Tensor, group: str) -> Tensor:
        return _of_one_rank(x, group)

    def broadcast(self, data: bytes, group: str) -> bytes:
        _of_one_rank(None, group)
        return data

    def launch(self, plan_json: str) -> None:
        """There are no further ranks to start."""

    def healthy(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        """Nothing was started, so nothing is ended."""


def _of_one_rank(x: T, group: str) -> T:
    if group not in GROUPS:
        raise ValueError(f"unknown process group {group!r}: expected one of {', '.join(GROUPS)}")
    return x
