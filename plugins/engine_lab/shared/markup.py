"""HTML and SVG as strings in which everything that is not markup is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Markup(str):
    """Text that may stand in a page as it is."""


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element. ``class_`` is ``class``, other underscores are hyphens; an attribute that is ``None`` is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in content))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], class_: str | None = None) -> Markup:
    """A table; wide ones scroll by themselves."""
    header = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    return tag("div", tag("table", header, body, class_=class_), class_="scroll", tabindex=0)
