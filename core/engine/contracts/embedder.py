"""Slot ``embedder``: what does this text mean?

Asked by routers that compare texts, through :attr:`BuildContext.embedder
<engine.contracts.provider.BuildContext.embedder>`: a plugin that nobody asks for is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Embedder(Protocol):
    """The plugin; lives in the API process, called on the thread of its event loop: while it computes, nobody is
    served. A short text should take it well below a millisecond."""

    dim: int
    """Numbers in a vector."""

    def embed(self, text: str) -> Sequence[float]:
        """A vector of :attr:`dim` finite numbers, of length 1, so that the inner product of two is the cosine of the
        angle between them: 1 for the same direction. All zeros for a text of which nothing is known. Equal texts have
        equal vectors."""
        ...
