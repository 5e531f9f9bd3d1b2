"""All ranks of a model in one process, a thread and a cache each.

What they compute is compared with what one rank computes: :func:`compare`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

from engine.contracts.communicator import Communicator, World
from engine.contracts.graph import Graph
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import ModelFacts
from engine.contracts.quantizer import Quantizer
from engine.kernels.loading import load_model
from engine.kernels.model import LoweredModel
from engine.kernels.settings import Kernels
from engine.kv.groups import cache_groups, of_rank
from engine.models.expert_load import ExpertLoad
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.sharding import smallest_cut
from engine.testing.attention_cases import PlainFormat
from engine.testing.paged_loop import PagedLoop, Row
from engine.testing.plain import PlainAttention, PlainQuantizer

T = TypeVar("T")
TIMEOUT_S = 60.0
"""Of a collective: a bug in a test must end, and a slow machine must not look like one."""


class RankLoop(PagedLoop):
    """One rank of several. All of them make the same calls."""

    def __init__(
        self, model: LoweredModel, whole: Graph, own: RankGraph, layout: Layout, rank: int,
        communicator: Communicator, kv_format: KVFormat | None = None, num_blocks: int = 64,
    ) -> None:  # fmt: skip
        """``whole``: the model's graph, whose KV groups all ranks have."""
        groups = of_rank(cache_groups(whole.caches), own)
        super().__init__(model, num_blocks=num_blocks, kv_format=kv_format, groups=groups)
        self._layout, self._rank, self._communicator = layout, rank, communicator

    def step(self, rows: Sequence[Row], aux_layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """As that of one rank; of a stage that others follow, what it hands on."""
        before, after = self._layout.before(self._rank), self._layout.after(self._rank)
        tokens, graph, received = sum(len(new) for _, new in rows), self.model.graph, []
        if before is not None:
            shapes = [(tokens, graph.sizes[number]) for number in graph.received]
            received = [self._communicator.recv(torch.empty(shape), before) for shape in shapes]
        hidden, beside = self.model.forward(self._batch(rows), self.kv, aux_layers, received)
        if after is not None:
            for handed_on in (hidden, *beside):
                self._communicator.send(handed_on.contiguous(), after)
        return hidden, beside

    def logits(self, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        """As that of one rank; nothing of a stage that others follow."""
        if self._layout.after(self._rank) is None:
            return super().logits(rows)
        self.step(rows)
        return ()


class Ranks:
    """The ranks of a model, loaded: in float32 on this CPU."""

    def __init__(
        self, model: ModelFacts, graph: Graph, layout: Layout, make: Callable[[], Communicator], *,
        kernels: Kernels = "torch", quantizer: Quantizer | None = None, kv_format: Callable[[], KVFormat] = PlainFormat,
        load: ExpertLoad | None = None,
    ) -> None:  # fmt: skip
        """``make``: a communicator, of those that meet in one process; ``load``: of the experts. Raises what
        :func:`place` does."""
        quantizer = quantizer or PlainQuantizer()
        self.layout = layout
        self.placed = place(graph, layout, partial(smallest_cut, quantizer), load=load)
        self.communicators = [make() for _ in self.placed]
        worlds = [World(rank, layout.size, layout.groups(rank), "cpu", TIMEOUT_S) for rank in range(layout.size)]
        invitation = self.communicators[0].invite(worlds[0])

        def start(rank: int) -> RankLoop:
            own, communicator = self.placed[rank], self.communicators[rank]
            communicator.start(worlds[rank], invitation)
            loaded = load_model(
                model, graph, quantizer, PlainAttention(), kv_format(), "float32", "cpu",
                kernels=kernels, own=own.graph, collectives=communicator,
            )  # fmt: skip
            loop = RankLoop(loaded, graph, own, layout, rank, communicator, kv_format())
            set_scales(loop)
            return loop

        self.loops = self.together(start)

    def together(self, work: Callable[[int], T]) -> list[T]:
        """What all ranks make, each in a thread. Raises the first error of any of them."""
        made: dict[int, T] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                made[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                for communicator in self.communicators:
                    communicator.abort(f"rank {rank}: {error}")

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.layout.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [made[rank] for rank in range(self.layout.size)]

    def logits(self, steps: Sequence[Sequence[Row]]) -> list[Tensor]:
        """:func:`logits` of each rank of the last stage."""
        found = self.together(lambda rank: logits(self.loops[rank], steps))
        return found[self.layout.chooser :]

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def set_scales(loop: PagedLoop) -> None:
    """Of keys and values, as the checkpoint has them."""
    for cache, scales in enumerate(loop.model.kv_scales):
        if scales is not None:
            loop.kv.set_scales(cache, *scales)


def logits(loop: PagedLoop, steps: Sequence[Sequence[Row]]) -> Tensor:
    """float32 ``[num_tokens, vocab]`` of new sequences: of all tokens, step by step; empty of a stage that others
    follow. The rows of ``steps`` count sequences from 0."""
    added: dict[int, int] = {}
    made: list[Tensor] = []
    for rows in steps:
        for number, _ in rows:
            if number not in added:
                added[number] = loop.add()
        made += loop.logits([(added[number], tokens) for number, tokens in rows])
    return torch.cat(made) if made else torch.empty(0)


def steps_of(sequences: Sequence[Sequence[int]], chunks: Sequence[int]) -> list[list[Row]]:
    """All sequences at once, each step ``chunks`` tokens of the first and some fewer of the others, then one by
    one. No sequence is shorter than the number of chunks."""
    steps: list[list[Row]] = []
    at = [0] * len(sequences)
    for size in (*chunks, *[1] * max(map(len, sequences))):
        rows: list[Row] = []
        for number, tokens in enumerate(sequences):
            new = tokens[at[number] : at[number] + max(1, size - number)]
            at[number] += len(new)
            if new:
                rows.append((number, new))
        if rows:
            steps.append(rows)
    return steps


@dataclass(frozen=True, slots=True)
class Difference:
    """Of logits from those of one rank."""

    drift: float
    """The largest difference, as a share of the largest logit."""
    typical: float
    """The largest difference of a token, likewise: the median of all tokens."""
    changed: int
    """Positions at which another token is the most likely one."""
    margin: float
    """By how much the most likely token of one rank is ahead of that one, at most, as a share of the largest logit:
    a near-tie where it is no more than twice the drift."""
    closest: float
    """By how much the most likely token is ahead of the second at least, likewise."""
    is_one: bool
    """All ranks have the same bits."""

    @property
    def equal_but_for_ties(self) -> bool:
        return self.margin <= 2 * self.drift


def compare(want: Tensor, found: Sequence[Tensor]) -> Difference:
    """``want``: of one rank, ``[num_tokens, vocab]``; ``found``: of all ranks that make logits."""
    got, largest = found[0], float(want.abs().max())
    likely, chosen = want.argmax(dim=-1), got.argmax(dim=-1)
    lag = want.gather(1, likely[:, None]) - want.gather(1, chosen[:, None])
    best = want.topk(2, dim=-1).values
    of_tokens = (got - want).abs().amax(dim=-1)
    return Difference(
        drift=float(of_tokens.max()) / largest,
        typical=float(of_tokens.median()) / largest,
        changed=int((likely != chosen).sum()),
        margin=float(lag.max()) / largest,
        closest=float((best[:, 0] - best[:, 1]).min()) / largest,
        is_one=len({hash_of(one) for one in found}) == 1,
    )


def hash_of(tensor: Tensor) -> str:
    """Of its bits."""
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
