"""What a rank exchanges with others in a step, beside what its graph does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.communicator import Communicator
from engine.kernels.model import LoweredModel
from engine.models.stages import Stage


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's view."""

    communicator: Communicator
    chooses: bool
    """This rank chooses tokens; the others of its stage are told."""
    chooser: int
    alone: bool
    """No other rank is in its stage."""
    stage: Stage
    aux_layers: tuple[int, ...] = ()
    """Hidden states of the whole model that a drafter behind the last stage wants."""
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

    # Stages ----------------------------------------------------------------------------------------------------------

    @property
    def own_aux_layers(self) -> tuple[int, ...]:
        """Of ``aux_layers`` those that this stage has, counted from its first layer."""
        end = self.stage.last + (self.behind is None)
        return tuple(layer - self.stage.first for layer in self.aux_layers if self.stage.first <= layer < end)

    def received(self, model: LoweredModel, num_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """What the stage before hands on, ``[num_tokens, size]`` each: the values that layers read, and the hidden
        states for the drafter so far. Nothing in the first stage."""
        if self.before is None:
            return [], []
        sizes = [model.graph.sizes[number] for number in model.graph.received]
        sizes += [sizes[0]] * sum(layer < self.stage.first for layer in self.aux_layers)
        found = [
            self.communicator.recv(torch.empty(num_tokens, size, dtype=model.dtype, device=model.device), self.before)
            for size in sizes
        ]
        return found[: len(model.graph.received)], found[len(model.graph.received) :]

    def hand_on(self, values: Sequence[Tensor]) -> None:
        """To the next stage."""
        assert self.behind is not None
        for value in values:
            self.communicator.send(value.contiguous(), self.behind)
