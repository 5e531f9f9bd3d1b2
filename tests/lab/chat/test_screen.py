"""What the terminal shows while an answer grows."""

import io
import re

import pytest

from engine_lab.chat.screen import Screen, plain

WIDTH = 12


class Terminal:
    """As much of one as :class:`Screen` needs; a line that would get full is an error."""

    def __init__(self) -> None:
        self.rows, self.row, self.column = [""], 0, 0

    def take(self, output: str) -> None:
        for count, move, text in re.findall(r"\x1b\[(\d*)([JKACDm])|(\n|\r|[^\x1b\n\r])", output):
            if move:
                self._move(move, int(count or 1))
            elif text == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif text == "\r":
                self.column = 0
            else:
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + text + line[self.column + 1 :]
                self.column += 1
                assert self.column < WIDTH

    def _move(self, move: str, count: int) -> None:
        match move:
            case "J":
                del self.rows[self.row + 1 :]
                self._erase()
            case "K":
                self._erase()
            case "A":
                self.row -= count
            case "C":
                self.column += count
            case "D":
                self.column -= count

    def _erase(self) -> None:
        self.rows[self.row] = self.rows[self.row][: self.column]


def shown(pieces: list[str], status: str = "", end: bool = True) -> list[str]:
    out, terminal = io.StringIO(), Terminal()
    screen = Screen(out, WIDTH)
    for piece in pieces:
        screen.write(piece, status)
    if end:
        screen.end()
    terminal.take(out.getvalue())
    return [row.rstrip() for row in terminal.rows]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two", ["one two", ""]),
        ("one two three", ["one two", "three", ""]),
        ("one two thr four", ["one two thr", "four", ""]),
        ("a\n\nb\n", ["a", "", "b", ""]),
        ("elevenchars one", ["elevenchars", "one", ""]),
        ("abcdefghijklmnopqrstuvwxyz", ["abcdefghijk", "lmnopqrstuv", "wxyz", ""]),
        ("elevenchars\nx", ["elevenchars", "x", ""]),
    ],
)
def test_lines_break_between_words_however_the_text_arrives(text, expected):
    assert shown([text]) == shown(list(text), status="busy") == expected


def test_the_status_is_below_the_text_and_goes_at_the_end():
    assert shown(["some text that ", "grows"], "3 tok/s", end=False) == ["some text", "that grows", "3 tok/s"]
    assert shown(["some text"], "a status too long", end=False)[1] == "a status to"
    assert shown([], "") == [""]


def test_a_model_cannot_write_control_characters():
    assert plain("a\x1b[2J\x1b]0;title\x07b\r\tc\x9bd\n") == "a[2J]0;titleb    cd\n"
