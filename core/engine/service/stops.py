"""Stop strings in streamed text: found across token borders, never leaked in part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be shown. ``stopped``: a stop string was met and nothing follows."""

    text: str
    stopped: bool = False


class StopMatcher:
    """Holds back text that may turn out to be the beginning of a stop string.

    The stop string that is complete first wins (of two that end together, the one that began first), so the result
    does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> Released:
        """Add generated text."""
        if not self._stops:
            return Released(text)
        held = self._held + text
        found = self._first_complete(held)
        if found is not None:
            start, end = found
            self._held = ""
            return Released(held[: end if self._include else start], stopped=True)
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return Released(held[: len(held) - keep])

    def flush(self) -> str:
        """The output ended without a stop string: what was held back is plain text."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end)
        return best

    def _possible_start(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
