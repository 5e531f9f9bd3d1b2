"""What the words of ``engine kv`` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

URL = "http://127.0.0.1:8000"
EVERY = "all"
"""Instead of a namespace."""
FORMS = {
    "ls": (),
    "stats": ("[URL]",),
    "verify": ("[NAMESPACE]",),
    "export": ("FILE", "[NAMESPACE]"),
    "import": ("FILE",),
    "clear": ("NAMESPACE|all",),
    "warm": ("FILE", "[URL]"),
}
"""Each action with what comes after it; in brackets what may be left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An action, and what was said after it: empty for what was left out."""

    action: str
    file: str = ""
    namespace: str = ""
    url: str = ""


def parse(words: Sequence[str]) -> Asked:
    """Raises ``ValueError`` for what makes no sense."""
    if not words or words[0] not in FORMS:
        said = f"no such action {words[0]!r}" if words else "say what to do"
        raise ValueError(f"{said}; expected one of {', '.join(FORMS)}")
    action, rest = words[0], words[1:]
    form = FORMS[action]
    usage = " ".join(("engine kv", action, *form))
    if len(rest) < sum(not word.startswith("[") for word in form):
        raise ValueError(f"{action} needs {form[0]}: {usage}")
    if len(rest) > len(form):
        raise ValueError(f"unexpected {rest[len(form)]!r}: {usage}")
    if "" in rest:  # as from a shell's variable that is not set
        raise ValueError(f"an empty word is no {form[rest.index('')].strip('[]')}: {usage}")
    found = dict(zip(("".join(filter(str.isupper, word)) for word in form), rest, strict=False))
    if "URL" in found and "://" not in found["URL"]:
        raise ValueError(f"unexpected {found['URL']!r}, expected http://HOST:PORT: {usage}")
    return Asked(action, found.get("FILE", ""), found.get("NAMESPACE", ""), found.get("URL", ""))
