"""Router ``prefix``: the engine on which a request adds least to what has to be computed.

Each engine's score is the prompt tokens that wait there and those of this request that its prefix cache lacks, times
the sequences it has and :data:`STEP_SEQUENCES` (LMetric, arXiv:2603.15202, has 1 there). A long prefix in the cache of
an engine draws requests there until others would answer sooner, without a threshold. Equal scores: the fewest tokens
in flight; equal ones take turns.

What an engine has cached is not asked but remembered: the block keys of the prompts that were sent there, the least
recently used ones forgotten first. An engine that was started again, or is down, has nothing.

With one engine there is nothing to choose: no prompt is hashed, and nothing is remembered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Route
from engine.kv.block_keys import BlockKeys
from engine_plugins.router.direct import NOBODY, alive_in
from engine_plugins.router.least_load import sequences_of
from engine_plugins.router.round_robin import rotated

MOST_HASHED = 4096
"""Most blocks of a request that are hashed: others wait for it. What comes after them counts as not cached."""

STEP_SEQUENCES = 8
"""Chosen by simulation (``docs/measured.md``), where 4 to 32 do alike: a step reads all weights, however few sequences
it decodes. With 1, as LMetric has it, conversations leave the engine that has them for one that is nearly idle."""

Chain = Sequence[bytes]
"""The keys of a prompt's full blocks, in order."""


@dataclass(frozen=True)
class PrefixConfig(SlotConfig):
    """What is remembered of prompts, to send requests to the engines that have computed how they begin."""

    max_blocks: int = 32_768
    """Most KV blocks remembered of each engine. More than its pool has do little harm; fewer lose hits. 32,768 blocks
    of 16 tokens are 64 GiB of a model with 128 KiB of keys and values a token; remembered, they take 7 MiB."""

    def __post_init__(self) -> None:
        at_least("router.max_blocks", self.max_blocks, 1)


@dataclass(slots=True)
class Index:
    """What one start of an engine has computed. A key is always used after the keys of the blocks behind it, so that
    those are forgotten first: where a block is remembered, so are all before it."""

    starts: int
    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """The least recently used first."""

    def find(self, chain: Chain) -> int:
        """How many blocks of the prompt are there."""
        return bisect_left(chain, True, key=lambda key: key not in self.keys)

    def add(self, chain: Chain, max_blocks: int) -> None:
        keys = self.keys
        for key in reversed(chain):
            keys[key] = None
            keys.move_to_end(key)
        while len(keys) > max_blocks:
            keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Placed:
    """The request that was placed last."""

    request: ApiRequest
    fleet: tuple[EngineView, ...]
    chains: dict[int, list[Chain]]
    """Of each prompt, by block size."""


class PrefixRouter:
    """The plugin. What is remembered changes in :meth:`begun` alone."""

    def __init__(self, config: PrefixConfig, context: BuildContext) -> None:
        self._max_blocks = config.max_blocks
        self._indexes: dict[str, Index] = {}
        self._placed: Placed | None = None
        self._turn = 0

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        if len(fleet) < 2:
            self._placed = None
            return alive_in(fleet)
        engines = rotated(fleet, self._turn)
        chains = {size: chains_of(request, size) for size in {engine.block_size for engine in fleet}}
        self._placed = Placed(request, fleet, chains)
        if not engines:
            return NOBODY
        prompt_tokens = sum(map(len, request.prompts))
        scored = []
        for engine in engines:
            cached = self._cached(engine, request, chains[engine.block_size])
            new = (prompt_tokens - sum(cached)) * request.n
            score = (engine.queued_tokens + new) * (engine.sequences + STEP_SEQUENCES)
            scored.append((score, engine.queued_tokens + engine.running_tokens, engine, cached))
        scored.sort(key=lambda each: each[:2])
        _, _, first, cached = scored[0]
        reason = f"{sum(cached):,} of {prompt_tokens:,} tokens cached, {sequences_of(first.sequences)}"
        return Attempts(tuple([engine.engine_id for _, _, engine, _ in scored]), reason, cached)

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._turn += 1
        placed = self._placed
        if placed is None:
            self._indexes.clear()
            return
        alive = {engine.engine_id: engine for engine in placed.fleet if engine.alive}
        for name, index in tuple(self._indexes.items()):
            if name not in alive or alive[name].starts != index.starts:
                del self._indexes[name]
        if (engine := alive.get(engine_id)) is None:
            return
        size = engine.block_size
        chains = placed.chains[size] if request is placed.request else chains_of(request, size)
        index = self._indexes.setdefault(engine_id, Index(engine.starts))
        for chain in chains:
            index.add(chain, self._max_blocks)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember: an answer counts once it is part of a prompt."""

    def _cached(self, engine: EngineView, request: ApiRequest, chains: list[Chain]) -> tuple[int, ...]:
        """Of each prompt, the tokens that the engine has cached. The last one of a prompt is always computed."""
        index = self._indexes.get(engine.engine_id)
        if index is None or index.starts != engine.starts:
            return (0,) * len(chains)
        sizes = zip(request.prompts, chains, strict=True)
        return tuple([max(0, min(index.find(chain) * engine.block_size, len(prompt) - 1)) for prompt, chain in sizes])


def chains_of(request: ApiRequest, block_size: int) -> list[Chain]:
    """Of each prompt. Requests of different tenants or models share no key."""
    left, chains = MOST_HASHED, list[Chain]()
    for prompt in request.prompts:
        chain = BlockKeys((request.model, request.cache_salt), block_size).extend(prompt[: left * block_size])[1:]
        left -= len(chain)
        chains.append(chain)
    return chains
