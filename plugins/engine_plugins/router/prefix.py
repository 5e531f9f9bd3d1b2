"""Router ``prefix``: the engine that is soonest done with a prompt, as far as it has the prompt's beginning cached.

The score of an engine is LMetric (https://arxiv.org/abs/2603.15202): the prompt tokens that it would have to compute,
those that wait there included, times the sequences of its batch. A cached prefix lowers the one factor and a crowd
raises the other, so there is nothing to tune, and no prefix is so popular that all requests go to one engine.

What an engine has cached is known from what it was sent: blocks of tokens by their keys, in order of use. That is as
good as what engines would report, for one server in front of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Reject
from engine.kv.block_keys import BlockKeys
from engine_plugins.router.direct import NOBODY, alive_in
from engine_plugins.router.least_load import Turns, tokens_of

Keys = tuple[Sequence[bytes], ...]
"""For each prompt of a request, the names of its whole blocks, in order."""


@dataclass(frozen=True)
class PrefixConfig(SlotConfig):
    """By cached prefixes and load."""

    max_blocks: int = 65536
    """Most blocks remembered of each engine, about 150 bytes each. More than an engine can hold does little harm; far
    fewer, and prefixes are not found."""

    def __post_init__(self) -> None:
        at_least("router.max_blocks", self.max_blocks, 1)


@dataclass(slots=True)
class _Cached:
    """What one engine should have cached."""

    starts: int
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks are there, from the first one on."""
        return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))


class PrefixRouter:
    """The plugin. With one engine there is nothing to choose, and nothing is remembered."""

    def __init__(self, config: PrefixConfig, context: BuildContext) -> None:
        self._max_blocks = config.max_blocks
        self._cached: dict[str, _Cached] = {}
        self._turns = Turns()
        self._starts: dict[str, int] = {}
        """Of the engines of the fleet that was seen last."""
        self._keys: tuple[str, Keys] = ("", ())
        """Of the request that was placed last."""

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Attempts | Reject:
        if len(fleet) == 1:
            return alive_in(fleet, "the only one")
        self._starts = {engine.engine_id: engine.starts for engine in fleet}
        alive = [engine for engine in fleet if engine.alive]
        if not alive:
            return NOBODY
        size = alive[0].block_size
        keys = self._keys_of(request, size)
        prompts = request.prompts

        def cached(engine: EngineView) -> tuple[int, ...]:
            """For each prompt; at least one token of it is computed."""
            known = self._cached.get(engine.engine_id)
            if known is None or known.starts != engine.starts:
                return (0,) * len(prompts)
            found = zip(prompts, keys, strict=True)
            return tuple([min(len(prompt) - 1, size * known.count(names)) for prompt, names in found])

        hits = {engine.engine_id: cached(engine) for engine in alive}
        total = sum(map(len, prompts))

        def score(engine: EngineView) -> tuple[int, int, int]:
            computed = engine.queued_tokens + total - sum(hits[engine.engine_id])
            return computed * (engine.sequences + 1), tokens_of(engine), self._turns.of(engine)

        ordered = sorted(alive, key=score)
        best, hit = ordered[0], hits[ordered[0].engine_id]
        reason = f"{sum(hit)} of {total} prompt tokens cached, {best.sequences} sequences"
        return Attempts(tuple([engine.engine_id for engine in ordered]), reason, hit)

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        name, keys = self._keys
        if name != request.request_id or engine_id not in self._starts:
            return  # with one engine; a request that another engine takes over is not remembered there
        starts, known = self._starts[engine_id], self._cached.get(engine_id)
        if known is None or known.starts != starts:
            self._cached = {name: of for name, of in self._cached.items() if name in self._starts}
            known = self._cached[engine_id] = _Cached(starts)
        for names in keys:
            for key in reversed(names):  # the beginning of a prompt is the last to go
                known.blocks[key] = None
                known.blocks.move_to_end(key)
        while len(known.blocks) > self._max_blocks:
            known.blocks.popitem(last=False)
        self._turns.took(engine_id)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """Nothing to remember."""

    def _keys_of(self, request: ApiRequest, block_size: int) -> Keys:
        if self._keys[0] != request.request_id:
            chains = [BlockKeys((request.model, request.cache_salt), block_size) for _ in request.prompts]
            keys = tuple([chain.extend(ids)[1:] for chain, ids in zip(chains, request.prompts, strict=True)])
            self._keys = (request.request_id, keys)
        return self._keys[1]
