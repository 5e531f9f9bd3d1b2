"""Which cached item makes way: the least recently used, except that an owner may keep some of its items longer, at the
cost of its own others alone.

At each eviction the item that has not been used for longest says whose item goes, and its owner's retained items are
the last of that owner's to go. So every owner has as many items as it would have without retention, and those of others
are the same: retaining locks nothing, and takes nothing from anybody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

MOST_RETAINED = 0.5
"""Of all items: so many one owner may retain. Beyond that those that would lapse next lapse."""

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Retained:
    seconds: float
    until_s: float


class EvictionOrder(Generic[T]):
    """The items that may be evicted, and how long any item, also one that is in use, is retained after its last use.

    Of a text's items the tail makes way before the head if the tail is not retained for longer, and items that are used
    together are added the last first.
    """

    __slots__ = ("_clock", "_items", "_most", "_numbers", "_others", "_owner_of", "_retained", "_turn_of", "_until")

    def __init__(self, num_items: int, clock: Callable[[], float]) -> None:
        """``num_items``: most that there are; ``clock``: in seconds."""
        self._most = int(MOST_RETAINED * num_items)
        self._clock = clock
        self._numbers = count()
        self._items: OrderedDict[int, T] = OrderedDict()
        """By turn, next one first. An owner's items share its turns out anew, see :meth:`pop`."""
        self._turn_of: dict[T, int] = {}
        self._owner_of: dict[T, bytes] = {}
        self._others: dict[bytes, OrderedDict[T, None]] = {}
        """By owner: items that are not retained, least recently used first."""
        self._retained: dict[bytes, dict[float, OrderedDict[T, None]]] = {}
        """By owner and seconds: those that are, which therefore are in the order in which they lapse."""
        self._until: dict[T, _Retained] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._turn_of

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def add(self, item: T, owner: bytes) -> None:
        """An item was just used, and may be evicted from now on."""
        self.take(item)
        turn = next(self._numbers)
        self._items[turn] = item
        self._turn_of[item], self._owner_of[item] = turn, owner
        if item in self._until:
            self._keep(item, owner)
        else:
            self._others.setdefault(owner, OrderedDict())[item] = None

    def use(self, item: T) -> None:
        """An item that may be evicted was just used."""
        self.add(item, self._owner_of[item])

    def take(self, item: T) -> None:
        """It may not be evicted, if it might; it is in use."""
        turn = self._turn_of.pop(item, None)
        if turn is not None:
            del self._items[turn]
            self._leave(item, self._owner_of.pop(item))
            if item in self._until and self._until[item].until_s <= self._clock():
                del self._until[item]

    def first(self, item: T) -> None:
        """An item that may be evicted is to be the next one."""
        turn, owner = self._turn_of[item], self._owner_of[item]
        self._leave(item, owner)
        self._until.pop(item, None)
        others = self._others.setdefault(owner, OrderedDict())
        others[item] = None
        others.move_to_end(item, last=False)
        self._items.move_to_end(turn, last=False)

    def pop(self, held: Container[T] = ()) -> T | None:
        """Evict one that is not held. ``None``: all are."""
        for turn, due in self._items.items():
            owner = self._owner_of[due]
            if owner in self._retained:
                self._lapse(owner)
            victim = _first(self._others.get(owner, ()), held)
            if victim is None:
                victim = self._next_to_lapse(owner, held)
            if victim is None:
                continue
            if victim != due:  # which takes its turn
                self._items[self._turn_of[victim]], self._items[turn] = due, victim
                self._turn_of[due], self._turn_of[victim] = self._turn_of[victim], turn
            self.forget(victim)
            return victim
        return None

    def forget(self, item: T) -> None:
        """It is no more."""
        self.take(item)
        self._until.pop(item, None)

    def retain(self, item: T, seconds: float) -> None:
        """Keep it for so long after its last use, if it is not kept for longer. It was just used."""
        known, now_s = self._until.get(item), self._clock()
        if known is not None and known.until_s > now_s:
            seconds = max(seconds, known.seconds)
        owner = self._owner_of.get(item)
        if owner is not None:
            self._leave(item, owner)
        self._until[item] = _Retained(seconds, now_s + seconds)
        if owner is not None:
            self._keep(item, owner)

    def _keep(self, item: T, owner: bytes) -> None:
        """A retained item was just used."""
        kept = self._until[item]
        kept.until_s = self._clock() + kept.seconds
        classes = self._retained.setdefault(owner, {})
        classes.setdefault(kept.seconds, OrderedDict())[item] = None
        if sum(map(len, classes.values())) > self._most and (oldest := self._next_to_lapse(owner)) is not None:
            self._let_lapse(oldest, owner)

    def _leave(self, item: T, owner: bytes) -> None:
        kept = self._until.get(item)
        if kept is not None and item in self._retained.get(owner, {}).get(kept.seconds, ()):
            classes = self._retained[owner]
            del classes[kept.seconds][item]
            if not classes[kept.seconds]:
                del classes[kept.seconds]
            if not classes:
                del self._retained[owner]
            return
        del self._others[owner][item]
        if not self._others[owner]:
            del self._others[owner]

    def _lapse(self, owner: bytes) -> None:
        now_s = self._clock()
        while (item := self._next_to_lapse(owner)) is not None and self._until[item].until_s <= now_s:
            self._let_lapse(item, owner)

    def _next_to_lapse(self, owner: bytes, held: Container[T] = ()) -> T | None:
        """Of items that lapse at once the one with the shortest time: a head is kept no shorter than its tail."""
        found = [_first(items, held) for items in self._retained.get(owner, {}).values()]
        known = [(self._until[item].until_s, self._until[item].seconds, item) for item in found if item is not None]
        return min(known, key=lambda front: front[:2], default=(0.0, 0.0, None))[2]

    def _let_lapse(self, item: T, owner: bytes) -> None:
        """From now on it is as any other that was just used."""
        self._leave(item, owner)
        del self._until[item]
        self._others.setdefault(owner, OrderedDict())[item] = None


def _first(items: Iterable[T], held: Container[T]) -> T | None:
    return next((item for item in items if item not in held), None)
