"""Why a model answers, where its name stands for several."""

from __future__ import annotations

from engine.contracts.router import ModelChoice, ModelRequest, ModelView
from engine.testing.context import build_context
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

from ...service.fakes import MemoryExporter, in_loop
from .fakes import Backend, Exchange, before, until

NAMES = {"auto": ["small", "large"]}


class LargeFirst(PrefixRouter):
    def choose(self, request: ModelRequest, models: tuple[ModelView, ...]) -> ModelChoice:
        return ModelChoice(("large", "small"), "it is\nlong\x00")


async def fails(exchange: Exchange) -> None:
    await exchange.refuse(500, "some_code")


@in_loop
async def test_clients_and_events_are_told_why_a_model_answers() -> None:
    small, exporter = Backend("s", models=("small",)), MemoryExporter()
    large = Backend("l", [fails] * 2, models=("large",))

    def router() -> LargeFirst:
        return LargeFirst(PrefixConfig(), build_context())

    async with before(small, large, models=NAMES, make_router=router, exporters=[exporter]) as client:
        for expected in ("large did not answer", "it is long"):
            assert (await client.ask(model="auto")).headers["x-model-reason"] == expected
        assert "x-model-reason" not in (await client.ask(model="small")).headers, "nobody chose"
        await until(lambda: len(exporter.events) == 3)
        told = [(one.name, one.model, one.model_reason) for one in exporter.events]
        assert told == [
            ("auto", "small", "large did not answer"),
            ("auto", "large", "it is long"),
            ("small", "small", ""),
        ]
