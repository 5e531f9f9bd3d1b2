"""A fleet whose engines' counts are kept as a server keeps them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from engine.contracts.router import ApiRequest, Attempts, EngineView
from engine.service.load import Load, Share
from engine.testing.router import ALIVE, REQUEST

BLOCK = 16


def request(name: object, *prompts: tuple[int, ...], salt: str = "", n: int = 1) -> ApiRequest:
    return replace(REQUEST, request_id=str(name), prompts=prompts, cache_salt=salt, n=n)


def text(seed: int, blocks: int) -> tuple[int, ...]:
    """So many full blocks that no other seed has."""
    return tuple([seed * 1000 + i for i in range(blocks * BLOCK)])


@dataclass(slots=True)
class Fleet:
    """Engines that are sent what the router says, and answer nothing by themselves."""

    router: Any
    names: str = "abcd"
    dead: set[str] = field(default_factory=set)
    starts: Counter[str] = field(default_factory=Counter)
    loads: dict[str, Load] = field(init=False)
    shares: dict[str, list[Share]] = field(default_factory=dict)
    """By request."""

    def __post_init__(self) -> None:
        self.loads = {name: Load() for name in self.names}

    @property
    def views(self) -> tuple[EngineView, ...]:
        return tuple([
            replace(
                ALIVE, engine_id=name, alive=name not in self.dead, starts=1 + self.starts[name], block_size=BLOCK,
                sequences=load.sequences, queued_tokens=load.queued_tokens, running_tokens=load.running_tokens,
            )
            for name, load in self.loads.items()
        ])  # fmt: skip

    def ask(self, asked: ApiRequest) -> Attempts:
        route = self.router.place(asked, self.views)
        assert isinstance(route, Attempts), route
        return route

    def send(self, asked: ApiRequest) -> str:
        """Where it went."""
        route = self.ask(asked)
        name = route.engines[0]
        cached = route.cached_tokens or (0,) * len(asked.prompts)
        self.shares[asked.request_id] = [
            Share(self.loads[name], len(prompt), known)
            for prompt, known in zip(asked.prompts, cached, strict=True)
            for _ in range(asked.n)
        ]
        if hasattr(self.router, "begun"):
            self.router.begun(asked, name)
        return name

    def begin(self, asked: ApiRequest) -> None:
        """It has its first token."""
        for share in self.shares[asked.request_id]:
            share.took(1)

    def end(self, asked: ApiRequest) -> None:
        for share in self.shares.pop(asked.request_id):
            share.end()

    def serve(self, asked: ApiRequest) -> str:
        """To its end, before anything else comes."""
        name = self.send(asked)
        self.end(asked)
        return name
