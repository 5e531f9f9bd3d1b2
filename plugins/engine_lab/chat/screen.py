"""Text that grows in the terminal, with a line of status below it."""

from __future__ import annotations

import re
from typing import TextIO

from rich.cells import cell_len, set_cell_size

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""But for line feeds. A model's output may not move the cursor, retitle the window or ring the bell."""
ERASE_BELOW = "\x1b[J"
UP = "\x1b[A"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def plain(text: str) -> str:
    """Without control characters; a tab is four blanks."""
    return CONTROL.sub("", text.replace("\t", "    "))


class Screen:
    """Writes to a terminal ``width`` cells wide, breaking lines between words."""

    def __init__(self, out: TextIO, width: int) -> None:
        self._out, self._width = out, width
        self._column = 0
        self._word = ""
        """The end of the line, from the last blank on."""

    def write(self, text: str, status: str) -> None:
        """More text, and the status below it from now on."""
        self._out.write(ERASE_BELOW + "".join(map(self._placed, plain(text))) + self._below(status))
        self._out.flush()

    def end(self) -> None:
        """Takes the status away; what follows starts on a new line."""
        self._out.write(ERASE_BELOW + "\n" * (self._column > 0))
        self._out.flush()
        self._column, self._word = 0, ""

    def _placed(self, character: str) -> str:
        """The character after what it takes to make room for it. A line never gets full: terminals differ in where
        the cursor is then."""
        cells, broken = cell_len(character), ""
        if character != "\n" and self._column + cells >= self._width:
            word = cell_len(self._word)
            if character == " ":
                character = "\n"
            elif 0 < word < self._column:
                broken, self._column = f"\x1b[{word}D\x1b[K\n{self._word}", word
            else:
                broken, self._column, self._word = "\n", 0, ""
        if character == "\n":
            self._column, self._word = 0, ""
        else:
            self._column += cells
            self._word = "" if character == " " else self._word + character
        return broken + character

    def _below(self, status: str) -> str:
        shown = set_cell_size(status, min(cell_len(status), self._width - 1))
        right = f"\x1b[{self._column}C" * (self._column > 0)
        return f"\n{DIM}{shown}{PLAIN}{UP}\r{right}"
