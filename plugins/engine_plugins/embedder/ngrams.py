"""Embedder ``ngrams``: counts the parts of three and four characters of a text's words, hashed into few dimensions.

Texts that are spelt alike have similar vectors, whatever they mean. Case is folded; a word's ends are part of it.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import SlotConfig, between
from engine.contracts.provider import BuildContext

SIZES = (3, 4)
"""Characters of a part."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class NgramsConfig(SlotConfig):
    dim: int = 256
    """Numbers in a vector."""

    def __post_init__(self) -> None:
        between("embedder.dim", self.dim, 16, 4096)


class NgramsEmbedder:
    def __init__(self, config: NgramsConfig, context: BuildContext) -> None:
        self.dim = config.dim

    def embed(self, text: str) -> Sequence[float]:
        vector, dim = [0.0] * self.dim, self.dim
        for word in _WORD.findall(text.lower()):
            padded = f"<{word}>"
            for size in SIZES:
                for at in range(max(1, len(padded) - size + 1)):
                    hashed = zlib.crc32(padded[at : at + size].encode(errors="replace"))
                    vector[(hashed >> 1) % dim] += 1.0 if hashed & 1 else -1.0
        return unit(vector)


def unit(vector: Sequence[float]) -> Sequence[float]:
    """Of length 1, or all zeros."""
    length = math.sqrt(sum([value * value for value in vector])) or 1.0
    return [value / length for value in vector]
