"""What blocks hold, found again by name or by content: full blocks by their key, and any block by its tokens after a
parent."""

from __future__ import annotations

from bisect import bisect_left

Tokens = tuple[int, ...]


class BlockIndex:
    """Blocks with content, each once.

    The blocks after a parent are kept in the order of their tokens. Those that begin alike are then neighbours, so the
    one with the most tokens in common with a text is found by bisection, however many there are. No two have the same
    tokens.
    """

    __slots__ = ("_after", "_block_of", "_content_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, tuple[bytes, Tokens, bytes | None]] = {}  # parent, tokens, key
        self._after: dict[bytes, list[tuple[Tokens, int]]] = {}  # by parent, in order

    def __contains__(self, block: int) -> bool:
        return block in self._content_of

    def is_partial(self, block: int) -> bool:
        """Whether ``block`` is found and not full."""
        return block in self._content_of and self._content_of[block][2] is None

    def find(self, key: bytes) -> int | None:
        """The full block of this name."""
        return self._block_of.get(key)

    def most_in_common(self, parent: bytes, tokens: Tokens) -> tuple[int, int]:
        """The block after ``parent`` that begins like ``tokens`` for longest, and for how many of them; 0 and 0 if
        none does."""
        siblings = self._after.get(parent, ())
        at = bisect_left(siblings, (tokens,))
        best = (0, 0)
        for held, block in reversed(siblings[max(0, at - 1) : at + 1]):
            count = _common(held, tokens)
            if count > best[1]:
                best = block, count
        return best

    def beginning_with(self, parent: bytes, tokens: Tokens) -> int | None:
        """A block after ``parent`` that holds all of ``tokens`` first."""
        block, count = self.most_in_common(parent, tokens)
        return block if count == len(tokens) else None

    def add(self, block: int, parent: bytes, tokens: Tokens, key: bytes | None) -> int | None:
        """Find ``block`` from now on, by these tokens after ``parent``, and by ``key`` if it is full. Returns a block
        that it makes superfluous, if one is seen: it holds the first of the same tokens, and is not full."""
        self._content_of[block] = parent, tokens, key
        if key is not None:
            self._block_of[key] = block
        siblings = self._after.get(parent)
        if siblings is None:
            self._after[parent] = [(tokens, block)]
            return None
        at = bisect_left(siblings, (tokens,))
        siblings.insert(at, (tokens, block))
        if at == 0:
            return None
        before, superfluous = siblings[at - 1]
        return superfluous if tokens[: len(before)] == before else None

    def remove(self, block: int) -> None:
        """Do not find ``block`` any more."""
        parent, tokens, key = self._content_of.pop(block)
        if key is not None:
            del self._block_of[key]
        siblings = self._after[parent]
        if len(siblings) == 1:
            del self._after[parent]
        else:
            del siblings[bisect_left(siblings, (tokens,))]

    def check(self, block_size: int) -> None:
        """Assert that all three tables say the same, in order. For tests."""
        keyed = {key: block for block, (_, _, key) in self._content_of.items() if key is not None}
        assert keyed == self._block_of, "keys and blocks disagree"
        after: dict[bytes, list[tuple[Tokens, int]]] = {}
        for block, (parent, tokens, key) in self._content_of.items():
            assert 0 < len(tokens) <= block_size, f"block {block} holds {len(tokens)} of {block_size} tokens"
            assert (len(tokens) == block_size) == (key is not None), f"block {block} has a key and is not full, or not"
            after.setdefault(parent, []).append((tokens, block))
        assert {parent: sorted(siblings) for parent, siblings in after.items()} == self._after
        assert all(len({tokens for tokens, _ in siblings}) == len(siblings) for siblings in after.values())


def _common(a: Tokens, b: Tokens) -> int:
    """How many tokens are the same from the first on."""
    for count, (one, other) in enumerate(zip(a, b)):
        if one != other:
            return count
    return min(len(a), len(b))
