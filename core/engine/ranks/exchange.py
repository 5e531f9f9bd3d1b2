"""What a rank exchanges with others in a step, beside what its graph does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.communicator import Communicator
from engine.kernels.context import Cache, ForwardBatch
from engine.kernels.model import LoweredModel
from engine.kernels.torch.reference import NOT_FINITE


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's view."""

    communicator: Communicator
    chooses: bool
    """This rank chooses tokens; the others of its stage are told."""
    chooser: int
    tp: int
    """Ranks that share out the vocabulary."""
    num_ranks: int
    """Of its stage."""
    before: int | None = None
    """The rank of the stage before that hands it values; ``None`` in the first stage."""
    after: int | None = None
    """The rank of the next stage; ``None`` in the last one, which samples."""

    aux_layers: tuple[int, ...] = ()
    """Hidden states that a drafter wants, of the whole model."""
    first_layer: int = 0
    last_layer: int = 0
    """Of this stage; the last one not included."""

    @property
    def samples(self) -> bool:
        """This rank is of the last stage."""
        return self.after is None

    @property
    def own_aux_layers(self) -> tuple[int, ...]:
        """Those of ``aux_layers`` that are made here, counted from this stage's first layer."""
        end = self.last_layer + self.samples
        return tuple([layer - self.first_layer for layer in self.aux_layers if self.first_layer <= layer < end])

    @property
    def relays(self) -> bool:
        """The ranks of other stages learn of tokens and drafts by the plans that follow."""
        return self.before is not None or self.after is not None

    def agreed(self, x: Tensor) -> Tensor:
        """``x`` as the rank has it that chooses; all ranks of the last stage call this alike. It is overwritten on
        the others."""
        return x if self.num_ranks == 1 else self.communicator.broadcast(x.contiguous(), "stage", self.chooser)

    def most_likely(self, logits: Tensor, first: int) -> Tensor:
        """The greedy token of each row, int64 ``[N]``, of a vocabulary that the ranks of the stage share out: as
        :func:`engine.kernels.torch.reference.most_likely`, the same on all ranks. ``logits``: float32 ``[N, own]``,
        from token ``first`` on."""
        largest, tokens = logits.max(dim=-1)
        own = torch.stack((largest.double(), (tokens + first).double()))  # ids are exact in float64
        parts = [torch.empty_like(own) for _ in range(self.tp)]
        self.communicator.all_gather(own, "tp", parts)
        best, ids = torch.stack(parts, dim=1)
        largest_of_all, rank = best.max(dim=0)  # the first of equals, and the lowest tokens are on the first rank
        found = ids.gather(0, rank[None])[0].to(torch.int64)
        tokens = torch.where(largest_of_all.isfinite(), found, NOT_FINITE)
        return tokens if self.tp == self.num_ranks else self.agreed(tokens)

    def forward(self, model: LoweredModel, batch: ForwardBatch, kv: Cache) -> tuple[Tensor, list[Tensor]]:
        """This stage's part of :meth:`LoweredModel.forward`, between the one before and the one after: what comes back
        means something in the last stage alone."""
        aux_layers, graph = self.own_aux_layers, model.graph
        earlier = [layer for layer in self.aux_layers if layer < self.first_layer]
        later = [
            layer for layer in self.aux_layers if layer >= self.first_layer and layer - self.first_layer in aux_layers
        ]
        received: list[Tensor] = []
        if self.before is not None:
            sizes = [graph.sizes[number] for number in graph.received] + [graph.hidden_size] * len(earlier)
            received = [self._receive(model, batch, size) for size in sizes]
        handed, passing = received[: len(graph.received)], received[len(graph.received) :]
        hidden, made = model.forward(batch, kv, aux_layers, handed)
        aux = dict(zip((*earlier, *later), (*passing, *made), strict=False))
        if self.after is not None:
            for x in (hidden, *made[len(aux_layers) :], *(aux[layer] for layer in self.aux_layers if layer in aux)):
                self.communicator.send(x.contiguous(), self.after)
        return hidden, [aux[layer] for layer in self.aux_layers if layer in aux]

    def _receive(self, model: LoweredModel, batch: ForwardBatch, size: int) -> Tensor:
        assert self.before is not None
        x = torch.empty(len(batch.token_ids), size, dtype=model.dtype, device=batch.token_ids.device)
        return self.communicator.recv(x, self.before)
