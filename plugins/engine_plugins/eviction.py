"""Which cached item makes way: the least recently used, except that an owner may keep some of its items longer, at the
cost of its own others alone.

At each eviction the item that has not been used for longest, of those that are not held, says whose item goes, and its
owner's retained items are the last of that owner's to go. So every owner has as many items as it would have without
retention, and those of others are the same: retaining locks nothing, and takes nothing from anybody else.

While nothing is retained all of it is an ordered dictionary. The first item that is retained, and the last that is
not any more, cost a pass over all items.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
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

    __slots__ = ("_clock", "_most", "_plain", "_retaining")

    def __init__(self, num_items: int, clock: Callable[[], float]) -> None:
        """``num_items``: most that there are; ``clock``: in seconds."""
        self._most = int(MOST_RETAINED * num_items)
        self._clock = clock
        self._plain: OrderedDict[T, bytes] = OrderedDict()
        """While nothing is retained: items with their owners, next one first."""
        self._retaining: _Retaining[T] | None = None
        """While something is: all of them."""

    def __len__(self) -> int:
        return len(self._plain if self._retaining is None else self._retaining.items)

    def __contains__(self, item: object) -> bool:
        return item in (self._plain if self._retaining is None else self._retaining.owner_of)

    def __iter__(self) -> Iterator[T]:
        return iter(self._plain if self._retaining is None else self._retaining.items.values())

    def owner_of(self, item: T) -> bytes:
        """Of an item that may be evicted."""
        return (self._plain if self._retaining is None else self._retaining.owner_of)[item]

    def add(self, item: T, owner: bytes) -> None:
        """An item was just used, and may be evicted from now on."""
        if self._retaining is None:
            self._plain[item] = owner
            self._plain.move_to_end(item)
        else:
            self._retaining.add(item, owner)

    def take(self, item: T) -> None:
        """It may not be evicted, if it might; it is in use."""
        if self._retaining is None:
            self._plain.pop(item, None)
        else:
            self._retaining.take(item)

    def first(self, item: T) -> None:
        """An item that may be evicted is to be the next one."""
        if self._retaining is None:
            self._plain.move_to_end(item, last=False)
        else:
            self._retaining.first(item)

    def pop(self, held: Collection[T] = ()) -> T | None:
        """Evict one that is not held. ``None``: all are."""
        if self._retaining is not None:
            victim = self._retaining.pop(held)
            if self._retaining.is_plain:
                owner_of = self._retaining.owner_of
                self._plain, self._retaining = OrderedDict((each, owner_of[each]) for each in self), None
            return victim
        if not held:
            return self._plain.popitem(last=False)[0] if self._plain else None
        victim = _first(self._plain, held)
        if victim is not None:
            del self._plain[victim]
        return victim

    def forget(self, item: T) -> None:
        """It is no more."""
        self.take(item)
        if self._retaining is not None:
            self._retaining.until.pop(item, None)

    def retain(self, item: T, seconds: float) -> None:
        """Keep it for so long after its last use, if it is not kept for longer. It was just used."""
        if self._retaining is None:
            self._retaining = _Retaining(self._most, self._clock)
            for each, owner in self._plain.items():
                self._retaining.add(each, owner)
            self._plain.clear()
        self._retaining.retain(item, seconds)


class _Retaining(Generic[T]):
    """An order in which some items are retained."""

    __slots__ = (
        "_clock",
        "_lapsed",
        "_most",
        "_numbers",
        "_others",
        "_retained",
        "_turn_of",
        "items",
        "owner_of",
        "until",
    )

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """``most``: items that one owner may retain."""
        self._most = most
        self._clock = clock
        self._numbers = count()
        self.items: OrderedDict[int, T] = OrderedDict()
        """By turn, next one first. An owner's items share its turns out anew, see :meth:`pop`."""
        self._turn_of: dict[T, int] = {}
        self.owner_of: dict[T, bytes] = {}
        self._others: defaultdict[bytes, OrderedDict[T, None]] = defaultdict(OrderedDict)
        """By owner: items that are not retained, least recently used first."""
        self._retained: dict[bytes, dict[float, OrderedDict[T, None]]] = {}
        """By owner and seconds: those that are, which therefore are in the order in which they lapse."""
        self.until: dict[T, _Retained] = {}
        """Also of those that are in use."""
        self._lapsed: set[T] = set()
        """Those of ``_others`` that are later in it than their turns say."""

    @property
    def is_plain(self) -> bool:
        """Nothing is retained, and all items go in the order of their turns."""
        return not self.until and not self._lapsed

    def add(self, item: T, owner: bytes) -> None:
        self.take(item)
        turn = next(self._numbers)
        self.items[turn] = item
        self._turn_of[item], self.owner_of[item] = turn, owner
        if item in self.until:
            self._keep(item, owner)
        else:
            self._others[owner][item] = None

    def take(self, item: T) -> None:
        turn = self._turn_of.pop(item, None)
        if turn is not None:
            del self.items[turn]
            self._lapsed.discard(item)
            self._leave(item, self.owner_of.pop(item))
            if item in self.until and self.until[item].until_s <= self._clock():
                del self.until[item]

    def first(self, item: T) -> None:
        turn, owner = self._turn_of[item], self.owner_of[item]
        self._leave(item, owner)
        self.until.pop(item, None)
        self._lapsed.discard(item)
        others = self._others[owner]
        others[item] = None
        others.move_to_end(item, last=False)
        self.items.move_to_end(turn, last=False)

    def pop(self, held: Collection[T] = ()) -> T | None:
        for turn, due in self.items.items():
            if due in held:
                continue
            owner = self.owner_of[due]
            if owner in self._retained:
                self._lapse(owner)
            victim = _first(self._others.get(owner, ()), held)
            if victim is None:
                victim = self._next_to_lapse(owner, held)
            assert victim is not None
            if victim != due:  # which takes its turn
                self.items[self._turn_of[victim]], self.items[turn] = due, victim
                self._turn_of[due], self._turn_of[victim] = self._turn_of[victim], turn
            self.take(victim)
            self.until.pop(victim, None)
            return victim
        return None

    def retain(self, item: T, seconds: float) -> None:
        known, now_s = self.until.get(item), self._clock()
        if known is not None and known.until_s > now_s:
            seconds = max(seconds, known.seconds)
        owner = self.owner_of.get(item)
        if owner is not None:
            self._leave(item, owner)
            self._lapsed.discard(item)
        self.until[item] = _Retained(seconds, now_s + seconds)
        if owner is not None:
            self._keep(item, owner)

    def _keep(self, item: T, owner: bytes) -> None:
        """A retained item was just used."""
        kept = self.until[item]
        kept.until_s = self._clock() + kept.seconds
        classes = self._retained.setdefault(owner, {})
        classes.setdefault(kept.seconds, OrderedDict())[item] = None
        if sum(map(len, classes.values())) > self._most and (oldest := self._next_to_lapse(owner)) is not None:
            self._let_lapse(oldest, owner)

    def _leave(self, item: T, owner: bytes) -> None:
        kept = self.until.get(item)
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
        while (item := self._next_to_lapse(owner)) is not None and self.until[item].until_s <= now_s:
            self._let_lapse(item, owner)

    def _next_to_lapse(self, owner: bytes, held: Collection[T] = ()) -> T | None:
        """Of items that lapse at once the one with the shortest time: a head is kept no shorter than its tail."""
        found = [_first(items, held) for items in self._retained.get(owner, {}).values()]
        known = [(self.until[item].until_s, self.until[item].seconds, item) for item in found if item is not None]
        return min(known, key=lambda front: front[:2], default=(0.0, 0.0, None))[2]

    def _let_lapse(self, item: T, owner: bytes) -> None:
        """From now on it is as any other that was just used."""
        self._leave(item, owner)
        del self.until[item]
        self._others[owner][item] = None
        self._lapsed.add(item)


def _first(items: Iterable[T], held: Collection[T]) -> T | None:
    return next((item for item in items if item not in held), None)
