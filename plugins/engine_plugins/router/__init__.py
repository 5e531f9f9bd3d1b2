"""Who answers an API request."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.contracts.router import ANSWERS
from engine.hookspecs import hookimpl
from engine_plugins.router.prefix import PrefixConfig
from engine_plugins.router.response_cache import ResponseCacheConfig
from engine_plugins.router.semantic_cache import SemanticCacheConfig
from engine_plugins.router.tiered import TieredConfig


@hookimpl
def engine_router() -> list[Provider]:
    return [
        Provider("direct", "engine_plugins.router.direct:DirectRouter", doc="Every request to the first engine alive."),
        Provider(
            "round_robin",
            "engine_plugins.router.round_robin:RoundRobinRouter",
            doc="The engines that are alive in turn.",
        ),
        Provider(
            "least_load",
            "engine_plugins.router.least_load:LeastLoadRouter",
            doc="The engine with the fewest sequences, then tokens.",
        ),
        Provider(
            "prefix",
            "engine_plugins.router.prefix:PrefixRouter",
            config=PrefixConfig,
            doc="The engine on which a request adds least: cached prefixes and load, as LMetric does.",
        ),
        Provider(
            "response_cache",
            "engine_plugins.router.response_cache:ResponseCacheRouter",
            config=ResponseCacheConfig,
            provides=(ANSWERS,),
            doc="Answers repeated deterministic requests from memory; places the others as prefix does.",
        ),
        Provider(
            "semantic_cache",
            "engine_plugins.router.semantic_cache:SemanticCacheRouter",
            config=SemanticCacheConfig,
            provides=(ANSWERS,),
            doc="As response_cache, and answers questions that say the same in other words; audits itself.",
        ),
        Provider(
            "tiered",
            "engine_plugins.router.tiered:TieredRouter",
            config=TieredConfig,
            doc="At a gateway: short and simple conversations to the small model; places as prefix does.",
        ),
    ]
