"""Start-time fair queuing (Goyal, Vin, Cheng, SIGCOMM 1996) between clients.

A client's sequences get increasing start tags, each as far after the one before as that one costs; a client that had
nothing waiting starts at the tag that was served last. In the order of these tags clients that wait get equal shares,
however much each of them sent, and one client alone is served first come, first served.
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

    def join(self, client: str, cost: int = 1) -> int:
        """The start tag of a new sequence, and what is known of its cost."""
        tag = max(self._served, self._next.get(client, 0))
        self._next[client] = tag + cost
        self._present[client] += 1
        return tag

    def started(self, tag: int) -> None:
        self._served = max(self._served, tag)

    def leave(self, client: str, cost: int = 0) -> None:
        """One of its sequences has ended, and has cost so much more. A client without any is forgotten."""
        self._next[client] += cost
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client], self._next[client]
