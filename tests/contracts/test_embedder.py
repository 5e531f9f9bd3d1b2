"""An embedder is built for a router that asks for it, and for no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.assembly import bind
from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.contracts.embedder import Embedder
from engine.testing.context import build_context
from engine_plugins.embedder import ngrams


class Letters:
    dim = 1

    def embed(self, text: str) -> Sequence[float]:
        return [1.0]


def test_what_has_a_size_and_embeds_is_an_embedder() -> None:
    assert isinstance(Letters(), Embedder) and not isinstance(object(), Embedder)


@pytest.mark.parametrize("router, times", [("prefix", 0), ("response_cache", 0), ("semantic_cache", 1)])
def test_it_is_built_for_who_asks_and_costs_others_nothing(
    router: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = list[object]()

    class Counted(ngrams.NgramsEmbedder):
        def __init__(self, config: Any, context: Any) -> None:
            super().__init__(config, context)
            built.append(self)

    monkeypatch.setattr(ngrams, "NgramsEmbedder", Counted)
    bind.bind_api(assemble([f"router={router}", "exporter=[]", "device=cpu"]))
    assert len(built) == times


def test_one_that_cannot_be_built_stops_the_start_with_its_reason() -> None:
    plan = assemble(["router=semantic_cache", "embedder=static", "exporter=[]", "device=cpu"])
    with pytest.raises(AssemblyError, match=r"embedder\.path is empty; name a folder in the layout of model2vec"):
        bind.bind_api(plan)


def test_a_context_without_a_plan_has_none() -> None:
    with pytest.raises(ValueError, match="this context has no embedder"):
        build_context().embedder()
