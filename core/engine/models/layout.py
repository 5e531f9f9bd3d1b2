"""How ranks are numbered, and who works with whom. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.contracts.config import check_layout


@dataclass(frozen=True, slots=True)
class Layout:
    """``tp`` ranks share out every layer, ``pcp`` times so many share out the tokens of large steps, and ``pp`` stages
    hold some layers each: rank ``(stage * pcp + part) * tp + index``.

    ``ep``: over how many ranks whole experts are spread: of each ``tp``, where inside of such a share ``tp / ep`` ranks
    cut experts like everything else, or all ``tp * pcp`` of a stage. ``dcp``: how many of ``tp`` ranks that follow one
    another cache different tokens of the same key-value heads; it divides ``tp``.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dcp: int = 1
    pcp: int = 1

    def __post_init__(self) -> None:
        check_layout(self.tp, self.ep, self.dcp, self.pcp)

    @property
    def size(self) -> int:
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        return self.tp * self.pcp

    def stage(self, rank: int) -> int:
        return rank // self.stage_size

    def index(self, rank: int) -> int:
        """Which share of every layer it has."""
        return rank % self.tp

    def part(self, rank: int) -> int:
        """Which part of a step's tokens it computes."""
        return rank % self.stage_size // self.tp

    def expert_share(self, rank: int) -> int:
        """Which share of the experts it has."""
        if self.ep > self.tp:
            return rank % self.stage_size
        return self.index(rank) // (self.tp // self.ep)

    @property
    def chooser(self) -> int:
        """The rank that chooses tokens: the first of the last stage."""
        return (self.pp - 1) * self.stage_size

    def groups(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """As :attr:`engine.contracts.communicator.World.groups`: ``world``, ``stage``, ``tp``, the ranks that
        share out layers with it, and where ranks share out tokens ``pcp`` or ``dcp``, those that share them with it."""
        stage, first = self.stage(rank) * self.stage_size, rank // self.tp * self.tp
        ranks = {"world": range(self.size), "stage": range(stage, stage + self.stage_size)}
        ranks["tp"] = range(first, first + self.tp)
        if self.pcp > 1:
            ranks["pcp"] = range(stage + self.index(rank), stage + self.stage_size, self.tp)
        if self.dcp > 1:
            first += self.index(rank) // self.dcp * self.dcp
            ranks["dcp"] = range(first, first + self.dcp)
        return {name: tuple(members) for name, members in ranks.items()}

    def before(self, rank: int) -> int | None:
        """The rank of the stage before that hands it the residual stream."""
        return rank - self.stage_size if rank >= self.stage_size else None

    def after(self, rank: int) -> int | None:
        """The rank of the next stage that it hands the residual stream to."""
        return rank + self.stage_size if rank + self.stage_size < self.size else None
