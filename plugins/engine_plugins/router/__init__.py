"""Who answers an API request."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.router.response_cache import ResponseCacheConfig


@hookimpl
def engine_router() -> list[Provider]:
    return [
        Provider("direct", "engine_plugins.router.direct:DirectRouter", doc="Every request to the engine."),
        Provider(
            "response_cache",
            "engine_plugins.router.response_cache:ResponseCacheRouter",
            config=ResponseCacheConfig,
            doc="Answers repeated deterministic requests from memory.",
        ),
    ]
