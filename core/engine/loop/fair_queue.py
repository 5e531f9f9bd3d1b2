"""Start-time fair queuing (Goyal, Vin, Cheng, SIGCOMM 1996) between clients, a sequence being the unit of work.

A client's sequences get increasing start tags, one apart; a client that had nothing waiting starts at the tag that was
served last. In the order of these tags clients that wait take turns, however many sequences each of them sent, and one
client alone is served first come, first served.
"""

from __future__ import annotations

from collections import Counter


class FairQueue:
    """Hands out start tags."""

    def __init__(self) -> None:
        self._served = 0
        """The highest tag among sequences that have started."""
        self._next: dict[str, int] = {}
        """By client with sequences in the engine: the tag after its last one."""
        self._present: Counter[str] = Counter()

    def join(self, client: str) -> int:
        """The start tag of a new sequence."""
        tag = max(self._served, self._next.get(client, 0))
        self._next[client] = tag + 1
        self._present[client] += 1
        return tag

    def started(self, tag: int) -> None:
        self._served = max(self._served, tag)

    def leave(self, client: str) -> None:
        """One of its sequences has ended. A client without any is forgotten."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client], self._next[client]
