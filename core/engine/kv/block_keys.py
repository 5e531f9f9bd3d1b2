"""Names for the content of KV blocks: a chain of SHA-256 digests over full blocks of token ids.

A key stands for every token up to and including its block, and for everything else that decides what keys and
values those tokens get. Equal keys therefore mean interchangeable blocks; a cryptographic hash, unlike a fast one,
leaves nobody a way to craft a prompt that is served another tenant's cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256


class BlockKeys:
    """The key chain of one sequence, extended as its tokens become known.

    ``salt``: what must be equal, beside the tokens, for two sequences to share blocks: the tenant's salt, the
    model, the adapter, the KV format and the drafter's KV layout. Parts are length-prefixed before they are
    hashed, so moving a character from one part to the next gives another chain.

    ``block_size``: tokens per block.
    """

    __slots__ = ("_block_size", "_keys", "_pack")

    def __init__(self, salt: Sequence[str | bytes], block_size: int) -> None:
        root = sha256()
        for part in salt:
            data = part.encode() if isinstance(part, str) else part
            root.update(struct.pack("<Q", len(data)))
            root.update(data)
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._keys = [root.digest()]

    @property
    def keys(self) -> list[bytes]:
        """``keys[i]`` (32 bytes) names the first ``i`` blocks. Owned by this object; do not change it."""
        return self._keys

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash the full blocks of ``tokens`` that have no key yet and return :attr:`keys`.

        ``tokens`` are *all* tokens of the sequence so far (ids in 0 .. 2**32 - 1); those that were hashed before
        must be unchanged. A call that completes no block costs next to nothing.
        """
        size, keys = self._block_size, self._keys
        for start in range((len(keys) - 1) * size, len(tokens) - size + 1, size):
            keys.append(sha256(keys[-1] + self._pack(*tokens[start : start + size])).digest())
        return keys
