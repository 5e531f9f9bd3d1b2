"""Stop strings in streamed text: found across token borders, never leaked in part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be shown. ``stop``: the stop string that was met, after which nothing follows."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back text that may turn out to be the beginning of a stop string.

    The stop string that is complete first wins (of two that end together, the one that began first), so the result
    does not depend on how the text was cut into pieces. Stop strings that spell a token without visible text
    (``spelled``) are looked for in what is visible, and in the text that has such tokens spelled out.
    """

    __slots__ = ("_held", "_hidden", "_include", "_offsets", "_shown", "_visible")

    def __init__(self, stops: tuple[str, ...], include: bool = False, spelled: tuple[str, ...] = ()) -> None:
        """``include``: the text ends with the stop string, not before it. ``spelled``: some of ``stops``."""
        self._include = include
        self._visible = _Search(stops)
        self._hidden = _Search(spelled)
        self._offsets: list[int] = []
        """For each character that the second search holds, the visible characters before it."""
        self._shown = 0
        self._held = ""
        """Visible characters that are held back."""

    def feed(self, text: str, hidden: bool = False, may_stop: bool = True) -> Released:
        """Add generated text. ``hidden``: the spelling of a token without visible text. ``may_stop=False``: a stop
        string that is complete with this text is none."""
        matches = []
        if not hidden:
            self._held += text
            matches += self._visible.feed(text, may_stop)
        settled = self._visible.settled
        if self._hidden.stops:
            end = self._visible.end
            self._offsets += [end] * len(text) if hidden else range(end - len(text), end)
            held = self._hidden.settled
            for match in self._hidden.feed(text, may_stop):
                last = self._offsets[match.end - 1 - held]
                matches.append(_Match(self._offsets[match.start - held], last + (not hidden), match.text))
            del self._offsets[: self._hidden.settled - held]
            settled = min([settled, *self._offsets[:1]])
        if matches:
            first = min(matches, key=lambda match: (match.end, match.start))
            return Released(self._release(first.start) + (first.text if self._include else ""), first.text)
        return Released(self._release(settled))

    def flush(self) -> str:
        """The output ended without a stop string: what was held back is plain text."""
        return self._release(self._visible.end)

    def _release(self, until: int) -> str:
        count = until - self._shown
        text, self._held = self._held[:count], self._held[count:]
        self._shown = until
        return text


@dataclass(frozen=True, slots=True)
class _Match:
    """``start`` and ``end`` count characters from the beginning."""

    start: int
    end: int
    text: str


class _Search:
    """Finds strings in a growing text."""

    __slots__ = ("_longest", "_tail", "end", "settled", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.end = 0
        """Characters of the text so far."""
        self.settled = 0
        """No string that is not complete yet begins before this one."""
        self._longest = max(map(len, stops), default=0)
        self._tail = ""

    def feed(self, text: str, may_match: bool) -> list[_Match]:
        """Adds text; the first occurrence of each string that is complete with it."""
        tail, begin = self._tail + text, self.settled
        found: list[_Match] = []
        for stop in self.stops if may_match else ():
            # Not one that was complete before.
            start = tail.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                found.append(_Match(begin + start, begin + start + len(stop), stop))
        keep = self._possible_start(tail)
        self._tail = tail[len(tail) - keep :]
        self.end += len(text)
        self.settled = self.end - keep
        return found

    def _possible_start(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins some string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self.stops):
                return length
        return 0
