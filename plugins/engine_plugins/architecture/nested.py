"""Checkpoints of models that see images, of which the text model is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.values import Values
from engine.contracts.graph import Builder

BESIDE_TEXT = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "audio_tower.",
    "embed_audio.",
)  # fmt: skip
"""Parts of such checkpoints that see images or hear."""


def text_part(config: Mapping[str, Any], *, tied: bool | None = None) -> Mapping[str, Any]:
    """The part for text of a whole ``config.json``; all of it where it has no parts. Whether the head is the embedding
    is said beside the part for text by new checkpoints, in it by old ones; ``tied``: where new ones leave it out."""
    text = Values(config).section("text_config").values
    if not text:
        return config
    said = (of.get("tie_word_embeddings") for of in (config, {"tie_word_embeddings": tied}, text))
    return {**text, "tie_word_embeddings": next((each for each in said if each is not None), None)}


def text_model(b: Builder, *, old: str = "language_model.model") -> tuple[str, str]:
    """What names of the text model and of its head begin with, as the checkpoint has them. What sees images is not
    read. ``old``: how names begin where they do not begin with ``model.language_model``."""
    b.ignore(*BESIDE_TEXT, *(f"model.{part}" for part in BESIDE_TEXT))
    name = old if b.has(f"{old}.embed_tokens.") else "model.language_model"
    head = "language_model.lm_head" if b.has("language_model.lm_head.") else "lm_head"
    return name, head
