"""Problems of a configuration, collected and told once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class AssemblyError(Exception):
    """The engine cannot be put together as asked. ``problems``: what the user should know, one text each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))

    def text(self) -> str:
        """For a terminal."""
        if len(self.problems) == 1:
            return f"engine: {self.problems[0]}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"engine: cannot assemble this configuration:\n{lines}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no choice is near."""
    near = difflib.get_close_matches(word, sorted(set(choices)), n=2, cutoff=0.6)
    if not near:
        return ""
    return f"; did you mean {' or '.join(repr(name) for name in near)}?"


def listing(choices: Iterable[str]) -> str:
    """``a, b, c`` or ``(none)``."""
    return ", ".join(choices) or "(none)"
