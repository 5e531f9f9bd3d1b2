"""What was said, and how it is asked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

import msgspec

OURS = ("model", "messages", "stream", "stream_options", "n")
"""Fields of a request that are not the user's to set."""


@dataclass(slots=True)
class Conversation:
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    turns: list[dict[str, str]] = field(default_factory=list)

    def body(self, model: str, question: str) -> dict[str, Any]:
        """The request that asks ``question`` after what was said before."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            **self.params,
            "model": model,
            "messages": [*system, *self.turns, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def keep(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def set_params(self, text: str) -> None:
        """``temperature=0.7 stop=["a"]``: values are JSON, or else texts; an empty one removes a field. Raises
        ``ValueError``, and changes nothing then."""
        changed = dict(self.params)
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}; expected NAME=VALUE, such as temperature=0.7") from error
        for word in words:
            name, equals, value = word.partition("=")
            if not (equals and name.isidentifier()):
                raise ValueError(f"{word!r}: expected NAME=VALUE, such as temperature=0.7")
            if name in OURS:
                raise ValueError(f"{name} is set by engine chat; expected a sampling parameter, such as temperature")
            changed.pop(name, None)
            if value:
                changed[name] = _value(value)
        self.params = changed


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
