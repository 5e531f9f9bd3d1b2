"""What might come next."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.drafter.config import DraftModelConfig, Eagle3Config, EarlyExitConfig, ParallelBlockConfig
from engine_plugins.drafter.ngram import NgramConfig
from engine_plugins.drafter.none import NoDrafterConfig
from engine_plugins.drafter.suffix import SuffixConfig


@hookimpl
def engine_drafter() -> list[Provider]:
    return [
        Provider(
            "none",
            "engine_plugins.drafter.none:NoDrafter",
            config=NoDrafterConfig,
            doc="No speculation.",
        ),
        Provider(
            "ngram",
            "engine_plugins.drafter.ngram:NgramDrafter",
            config=NgramConfig,
            provides=("drafts", "host_drafter"),
            doc="Prompt lookup: continues as the same words continued earlier in the request.",
        ),
        Provider(
            "suffix",
            "engine_plugins.drafter.suffix:SuffixDrafter",
            config=SuffixConfig,
            provides=("drafts", "host_drafter"),
            doc="Continues as the same words continued in the request or in other requests' latest outputs.",
        ),
        Provider(
            "draft_model",
            "engine_plugins.drafter.draft_model:DraftModelDrafter",
            config=DraftModelConfig,
            provides=("drafts",),
            sources="engine.sampling.sources:drafting_sources",
            doc="A smaller model of the same family drafts.",
        ),
        Provider(
            "eagle3",
            "engine_plugins.drafter.eagle3.drafter:Eagle3Drafter",
            config=Eagle3Config,
            provides=("drafts",),
            sources="engine.sampling.sources:drafting_sources",
            doc="A small head on the model's hidden states drafts.",
        ),
        Provider(
            "parallel_block",
            "engine_plugins.drafter.parallel_block:ParallelBlockDrafter",
            config=ParallelBlockConfig,
            provides=("drafts",),
            doc="A small head fills a whole block of drafts in one pass.",
        ),
        Provider(
            "early_exit",
            "engine_plugins.drafter.early_exit:EarlyExitDrafter",
            config=EarlyExitConfig,
            provides=("drafts",),
            sources="engine.sampling.sources:drafting_sources",
            doc="The model's own first layers draft.",
        ),
    ]
