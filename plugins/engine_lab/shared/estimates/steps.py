"""How long steps of a model take when ranks share it out, and what fits into their memory: estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contracts.graph import Cached, Graph, KVSpec
from engine.contracts.ops.work import FLOAT32, OpWork, Step, Widths
from engine.kv.groups import PoolShape, cache_groups, of_rank
from engine.models.layout import Layout
from engine.models.placement import RankGraph, place
from engine.models.shares import Units
from engine.models.work import RankWork, held_bytes, work_of
from engine_lab.shared.estimates.collectives import Collectives
from engine_lab.shared.estimates.devices import GIB, Device
from engine_lab.shared.estimates.efficiency import Efficiency
from engine_lab.shared.estimates.errors import EstimateError

TOKEN_BYTES = 8
"""Of a token id that is sent to other ranks."""
UNLIMITED_BLOCKS = 1 << 40
"""More than any memory holds."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How memory is shared out between weights and KV pool."""

    fraction: float = 0.9
    """Of a device's memory, that the engine takes: ``memory.fraction``."""
    set_aside: int = 2 * GIB
    """Bytes for activations, tables, graphs and buffers of collectives: an assumption."""
    block_size: int = 16
    max_len: int = 8192
    """Most tokens of a request."""
    step_tokens: int = 2048
    """Most tokens of a step."""
    max_requests: int = 64


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Of one rank."""

    rank: int
    weights: int
    """Bytes."""
    kv_tokens: int | None
    """Tokens whose keys and values would fit beside them; 0: not one block, or not even the weights; ``None``: as many
    as you like, none are kept here."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds from a request's token to its next one, or of a whole prompt, and where they go."""

    ms: float
    reading: float
    """Of it, memory and multiplication, on the slowest rank of each stage."""
    layers: float
    """Of it, what layers take whatever they compute."""
    exchanging: float
    """Of it, collectives and hops between stages."""
    waiting: float
    """Of it, for other micro-batches in the slowest stage."""


@dataclass(slots=True)
class Estimate:
    """One model on one layout of one kind of devices. ``graph``: of the whole model; ``units``: how its layers may be
    cut. Raises :class:`EstimateError` for a layout that the model cannot have."""

    graph: Graph
    layout: Layout
    device: Device
    collectives: Collectives
    efficiency: Efficiency
    widths: Widths = field(default_factory=Widths)
    memory: Memory = field(default_factory=Memory)
    units: Units = field(default=lambda spec, axis: 1)
    hops: Collectives | None = None
    """Between stages, where they are linked otherwise than the ranks of one are."""
    ranks: tuple[RankGraph, ...] = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.pcp > 1:
            raise EstimateError(f"parallelism.pcp={layout.pcp}: no estimate is made of it; use parallelism.pcp=1")
        if min(layout.tp, layout.pp, layout.ep, layout.dcp) < 1:
            raise EstimateError(
                f"parallelism.tp={layout.tp} parallelism.pp={layout.pp} parallelism.ep={layout.ep}: expected at least 1"
            )
        try:
            self.ranks = place(self.graph, layout, self.units)
        except ValueError as error:
            raise EstimateError(str(error)) from error

    # Time ------------------------------------------------------------------------------------------------------------

    def decode(self, batch: int, context: int) -> StepTime:
        """From token to token of each of ``batch`` requests after ``context`` tokens. With stages the batch is cut
        into as many micro-batches, which follow one another through them."""
        pp = self.layout.pp
        if batch < 1:
            raise EstimateError(f"a batch of {batch} requests, expected at least 1")
        return self._through(Step(-(-batch // min(pp, batch)), 1, context), min(pp, batch))

    def prefill(self, num_tokens: int, context: int = 0) -> StepTime:
        """Of a prompt of ``num_tokens`` by itself, in one step, up to its first token."""
        if num_tokens < 1:
            raise EstimateError(f"a prompt of {num_tokens} tokens, expected at least 1")
        return self._through(Step(1, num_tokens, context), 1)

    def _through(self, step: Step, micro_batches: int) -> StepTime:
        stages = [self._stage(stage, step) for stage in range(self.layout.pp)]
        reading, layers, exchanging = (sum(part) for part in zip(*stages, strict=True))
        once = reading + layers + exchanging
        # The next token of a micro-batch waits until the slowest stage has served all the others.
        waiting = max(0.0, micro_batches * max(sum(stage) for stage in stages) - once)
        return StepTime(once + waiting, reading, layers, exchanging, waiting)

    def _stage(self, stage: int, step: Step) -> tuple[float, float, float]:
        """Milliseconds of reading, layers and exchanging, of the slowest rank of a stage."""
        layout = self.layout
        own = self.ranks[stage * layout.tp : (stage + 1) * layout.tp]
        works = [work_of(rank, step, self.widths, layout.ep) for rank in distinct(own)]
        reading = max(sum(self._op_s(op) for op in work.ops) for work in works)
        exchanging = self._exchanging_us(works[0], step, is_last=stage == layout.pp - 1)
        return reading * 1e3, self._layers_us(works[0]) / 1e3, exchanging / 1e3

    def _op_s(self, op: OpWork) -> float:
        """Seconds: it reads and multiplies at once."""
        reading = op.num_bytes / (self.efficiency.bandwidth * self.device.bandwidth)
        return max(reading, op.flops / (self.efficiency.flops * self.device.flops))

    def _layers_us(self, work: RankWork) -> float:
        return work.num_layers * self.efficiency.layer_us + work.num_mixtures * self.efficiency.mixture_us

    def _exchanging_us(self, work: RankWork, step: Step, is_last: bool) -> float:
        tp, costs = self.layout.tp, self.collectives
        us = 0.0
        for exchange in work.exchanges:
            of_kind = costs.all_reduce_us if exchange.kind == "all_reduce" else costs.all_gather_us
            us += of_kind(exchange.num_bytes, exchange.ranks or tp)
        if is_last:  # the tokens that the first rank has chosen
            us += costs.all_gather_us(step.requests * TOKEN_BYTES, tp)
        else:
            us += sum((self.hops or costs).send_us(num_bytes) for num_bytes in work.handed_on)
        return self.efficiency.collective * us

    # Memory ----------------------------------------------------------------------------------------------------------

    def rank_memory(self) -> tuple[RankMemory, ...]:
        """Of every rank."""
        budget = int(self.memory.fraction * self.device.memory) - self.memory.set_aside
        groups = cache_groups(self.graph.caches, dcp=self.layout.dcp)
        found = []
        for number, rank in enumerate(self.ranks):
            weights, own = held_bytes(rank.graph, self.widths), of_rank(groups, rank)
            sizes = [0] * own.num_groups
            for cache, group in zip(own.caches, own.group_of, strict=True):
                sizes[group] += self._block_bytes(cache)
            pool = PoolShape(
                own.reaches,
                tuple(sizes),
                self.memory.block_size,
                self.memory.max_len,
                self.memory.step_tokens,
                self.memory.max_requests,
                groups.full_share,
                for_one=-(-self.memory.max_len // self.memory.block_size),
            )
            blocks = pool.fitting(budget - weights, UNLIMITED_BLOCKS)
            tokens = None if blocks == UNLIMITED_BLOCKS else max(0, blocks - 1) * self.memory.block_size
            found.append(RankMemory(number, weights, tokens))
        return tuple(found)

    def _block_bytes(self, cache: Cached) -> int:
        if isinstance(cache, KVSpec):
            return int(self.memory.block_size * cache.numbers * self.widths.kv / 8)
        return (self.memory.block_size * cache.token_size + cache.state_size) * FLOAT32

    def binding(self) -> RankMemory:
        """The rank with the least room: all have as many blocks as it."""
        return min(self.rank_memory(), key=lambda rank: float("inf") if rank.kv_tokens is None else rank.kv_tokens)


def distinct(ranks: Sequence[RankGraph]) -> list[RankGraph]:
    """Those whose work may differ: with equal sizes of all values and caches it does not."""
    return list({(rank.graph.sizes, rank.graph.caches): rank for rank in ranks}.values())
