"""What a text means, as a vector."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.embedder.ngrams import NgramsConfig
from engine_plugins.embedder.static import StaticConfig


@hookimpl
def engine_embedder() -> list[Provider]:
    return [
        Provider(
            "ngrams",
            "engine_plugins.embedder.ngrams:NgramsEmbedder",
            config=NgramsConfig,
            doc="Hashed parts of words: knows spelling alone, in any language, and needs no file.",
        ),
        Provider(
            "static",
            "engine_plugins.embedder.static:StaticEmbedder",
            config=StaticConfig,
            doc="The mean of token vectors, read from a folder in the layout of model2vec.",
        ),
    ]
