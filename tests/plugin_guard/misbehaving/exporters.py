"""Exporters."""

from __future__ import annotations

from typing import Any


class Silent:
    """Correct: forgets everything, and has a page."""

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def export(self, events: Any) -> None:
        pass

    def render(self) -> Any:
        return ""

    def close(self) -> None:
        pass


class ExportRaises(Silent):
    """Raises at every batch."""

    says = r"export\(\) raised RuntimeError: no sink \(exporters\.py:\d+\)"

    def export(self, events: Any) -> None:
        raise RuntimeError("no sink")


class ExportExits(Silent):
    """Ends the process."""

    says = r"export\(\) raised SystemExit: 5"

    def export(self, events: Any) -> None:
        raise SystemExit(5)


class ChangesEvents(Silent):
    """Empties the batch that others get, too."""

    says = r"export\(\) raised AttributeError"

    def export(self, events: Any) -> None:
        events.clear()


class PageOfBytes(Silent):
    """Its page is no text."""

    says = r"render\(\) returned b'page', expected a text"

    def render(self) -> Any:
        return b"page"


class PageOfSurrogates(Silent):
    """Its page cannot be sent."""

    says = r"render\(\) raised UnicodeEncodeError"

    def render(self) -> Any:
        return "\ud800"


class RenderRaises(Silent):
    """Has no page to show."""

    says = r"render\(\) raised KeyError: 'page' \(exporters\.py:\d+\)"

    def render(self) -> Any:
        raise KeyError("page")


class CloseRaises(Silent):
    """Cannot be closed."""

    says = r"close\(\) raised OSError: flush \(exporters\.py:\d+\)"

    def close(self) -> None:
        raise OSError("flush")
