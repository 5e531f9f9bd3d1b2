"""Who runs a step, with how many tokens."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.scheduler.chunked_prefill import ChunkedPrefillConfig


@hookimpl
def engine_scheduler() -> list[Provider]:
    return [
        Provider(
            "static",
            "engine_plugins.scheduler.static:StaticScheduler",
            doc="Request-level batches: a batch runs to its end before the next one starts.",
        ),
        Provider(
            "continuous",
            "engine_plugins.scheduler.continuous:ContinuousScheduler",
            doc="Requests join and leave at every step; prompts run whole.",
        ),
        Provider(
            "chunked_prefill",
            "engine_plugins.scheduler.chunked_prefill:ChunkedPrefillScheduler",
            config=ChunkedPrefillConfig,
            doc="Decodes first; prompts run in chunks that fit the token and time budget.",
        ),
    ]
