"""How ranks are numbered, and who works with whom. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """``tp`` ranks share out every layer, ``pp`` stages hold some layers each: rank ``stage * tp + index``.

    ``ep``: over how many ranks of a stage whole experts are spread; inside of such a share ``tp / ep`` ranks cut
    experts like everything else. ``dcp``: how many ranks of a stage that follow one another cache different tokens of
    the same key-value heads. Both divide ``tp``.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("ep", "dcp"):
            if self.tp % (size := getattr(self, name)):
                raise ValueError(f"parallelism.{name}={size}: does not divide parallelism.tp={self.tp}")

    @property
    def size(self) -> int:
        return self.tp * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.tp

    def index(self, rank: int) -> int:
        """In its stage."""
        return rank % self.tp

    @property
    def chooser(self) -> int:
        """The rank that chooses tokens: the first of the last stage."""
        return (self.pp - 1) * self.tp

    def groups(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """As :attr:`engine.contracts.communicator.World.groups`: ``world``, ``tp``, the ranks of its stage, and where
        ranks share out tokens ``dcp``, those that share them with it."""
        first = self.stage(rank) * self.tp
        found = {"world": tuple(range(self.size)), "tp": tuple(range(first, first + self.tp))}
        if self.dcp > 1:
            first += self.index(rank) // self.dcp * self.dcp
            found["dcp"] = tuple(range(first, first + self.dcp))
        return found

    def before(self, rank: int) -> int | None:
        """The rank of the stage before that hands it the residual stream."""
        return rank - self.tp if rank >= self.tp else None

    def behind(self, rank: int) -> int | None:
        """The rank of the next stage that it hands the residual stream to."""
        return rank + self.tp if rank + self.tp < self.size else None
