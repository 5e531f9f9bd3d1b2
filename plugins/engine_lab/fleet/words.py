"""What the words of ``engine fleet`` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

URL = "http://127.0.0.1:8000"
WANTS = {"show": "", "restart": "", "drain": "the id of an engine", "undrain": "the id of an engine", "resize": "N"}
"""Each action with the word that it cannot do without."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``what``: the id of an engine or a number of them; empty: none was given."""

    action: str
    url: str
    what: str

    def path(self, force: bool) -> str:
        """Of the request that changes the fleet."""
        name = "replicas" if self.action == "resize" else "engine"
        query = urlencode({**({name: self.what} if self.what else {}), **({"force": "1"} if force else {})})
        return f"/engine/fleet/{self.action}" + (f"?{query}" if query else "")


def parse(words: Sequence[str]) -> Asked:
    """Raises ``ValueError`` for what makes no sense."""
    action, rest = (words[0], [*words[1:]]) if words and words[0] in WANTS else ("show", [*words])
    url = rest.pop(0) if rest and "://" in rest[0] else URL
    what = rest.pop(0) if rest and action != "show" else ""
    if rest:
        raise ValueError(f"unexpected {rest[0]!r}; expected one of {', '.join(WANTS)}, then http://HOST:PORT")
    if WANTS[action] and not what:
        raise ValueError(f"{action} needs {WANTS[action]}: engine fleet {action} {url} ...")
    if action == "resize" and not (what.isascii() and what.isdigit()):
        raise ValueError(f"resize {what!r}: expected a number of engines")
    return Asked(action, url, what)
