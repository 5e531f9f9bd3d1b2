"""What a rank exchanges with others in a step, beside what its graph does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.contracts.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's view."""

    communicator: Communicator
    chooses: bool
    """This rank chooses tokens; the others of its stage are told."""
    chooser: int
    alone: bool
    """No other rank is in its stage."""
    before: int | None = None
    """The rank of the stage before that hands it values; ``None`` in the first stage."""
    behind: int | None = None
    """The rank of the next stage; ``None`` in the last one, which samples."""

    @property
    def relays(self) -> bool:
        """The ranks of other stages learn of tokens and drafts by the plans that follow."""
        return self.before is not None or self.behind is not None

    def agreed(self, x: Tensor) -> Tensor:
        """``x`` as the rank has it that chooses; all ranks of the last stage call this alike. It is overwritten on
        the others."""
        return x if self.alone else self.communicator.broadcast(x.contiguous(), "tp", self.chooser)
