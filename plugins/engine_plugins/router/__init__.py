"""Who answers an API request."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.router.prefix import PrefixConfig
from engine_plugins.router.response_cache import ResponseCacheConfig


@hookimpl
def engine_router() -> list[Provider]:
    return [
        Provider("direct", "engine_plugins.router.direct:DirectRouter", doc="Every request to the first engine."),
        Provider(
            "round_robin",
            "engine_plugins.router.round_robin:RoundRobinRouter",
            doc="To one engine after the other.",
        ),
        Provider(
            "least_load",
            "engine_plugins.router.least_load:LeastLoadRouter",
            doc="To the engine with the fewest sequences.",
        ),
        Provider(
            "prefix",
            "engine_plugins.router.prefix:PrefixRouter",
            config=PrefixConfig,
            doc="To the engine that has most of the prompt cached, weighed against its load.",
        ),
        Provider(
            "response_cache",
            "engine_plugins.router.response_cache:ResponseCacheRouter",
            config=ResponseCacheConfig,
            doc="Answers repeated deterministic requests from memory.",
        ),
    ]
