"""Reading a message in the terminal, with the line editor's history."""

from __future__ import annotations

QUOTES = '"""'


def read_message(prompt: str) -> str:
    """A line; from ``\"\"\"`` on, all lines up to the next ``\"\"\"``. Raises ``EOFError`` at Ctrl-D and
    ``KeyboardInterrupt`` at Ctrl-C."""
    text = input(prompt)
    if not text.lstrip().startswith(QUOTES):
        return text
    text = text.lstrip().removeprefix(QUOTES)
    while QUOTES not in text:
        text += "\n" + input("... ")
    return text.partition(QUOTES)[0].strip("\n")
