"""Parallelism ``mine``: one rank, which has all of the work and nobody to exchange it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.config import ParallelismConfig
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = ("tp", "pp", "ep", "sp")


@dataclass(frozen=True)
class MineParallelismConfig(ParallelismConfig):
    """The keys ``parallelism.<field>``; those of the base are the sizes of the groups."""


@hookimpl
def engine_parallelism() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.parallelism.plugin:MineParallelism",
            config=MineParallelismConfig,
            # provides=("tp",) says that it can split tensors; without it parallelism.tp=2 is refused
            doc="One rank.",
        )
    ]


class MineParallelism:
    """Collectives work on groups of ranks; over one rank each gives back what went in."""

    rank = 0
    world_size = 1

    def __init__(self, config: MineParallelismConfig, context: BuildContext) -> None:
        pass

    def shard(self, spec: LinearSpec) -> tuple[int, int]:
        """``(index, count)``: which of how many equal cuts of a layer this rank holds."""
        return 0, 1

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        """The sum over all ranks of the group, on each of them."""
        return self._of_one_rank(x, group)

    def all_gather(self, x: Tensor, group: str, axis: int) -> Tensor:
        """What all ranks have, one after another along ``axis``."""
        return self._of_one_rank(x, group)

    def reduce_scatter(self, x: Tensor, group: str, axis: int) -> Tensor:
        """This rank's cut along ``axis`` of the sum over all ranks."""
        return self._of_one_rank(x, group)

    def all_to_all(self, x: Tensor, group: str) -> Tensor:
        """Cut ``i`` of every rank's tensor to rank ``i``."""
        return self._of_one_rank(x, group)

    def broadcast(self, data: bytes, group: str) -> bytes:
        """Rank 0's bytes, on every rank."""
        self._check(group)
        return data

    def launch(self, plan_json: str) -> None:
        """Start the processes of the further ranks; there are none."""

    def healthy(self) -> tuple[str, ...]:
        """Problems of workers, one line each."""
        return ()

    def close(self) -> None:
        """End what :meth:`launch` has started."""

    def _of_one_rank(self, x: Tensor, group: str) -> Tensor:
        self._check(group)
        return x

    @staticmethod
    def _check(group: str) -> None:
        if group not in GROUPS:
            raise ValueError(f"unknown process group {group!r}: expected one of {', '.join(GROUPS)}")
