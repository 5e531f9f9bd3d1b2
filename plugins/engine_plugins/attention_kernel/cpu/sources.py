"""What is compiled for a plan. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.native import Source

ELEMENTS = {"float32": "float", "bfloat16": "bfloat16"}
"""What is computed with: the names of types in ``attention.cpp``."""


def attention_source(computed: str, stored: str) -> Source:
    """For queries and for cached keys and values of these types of C++."""
    return Source(Path(__file__).with_name("attention.cpp"), (f"ELEMENT={computed}", f"STORED={stored}"))


def sources(config: SlotConfig, context: BuildContext) -> tuple[Source, ...]:
    """For a cache of the dtype that is computed with; one of 8 bits is compiled for when it is tried."""
    element = ELEMENTS.get(context.dtype)
    return () if element is None else (attention_source(element, element),)
