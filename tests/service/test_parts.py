"""Parts of an output that continue each other are one."""

from __future__ import annotations

from engine.service.parts import CallText, Part, Reasoning, Text, goes_on, merged


def test_pieces_of_a_text_and_of_a_calls_arguments_are_one_part() -> None:
    pieces: list[Part] = [
        Reasoning("a"), Reasoning("b"), Text("c"), Text("d"), CallText(0, "{", "x", "add"), CallText(0, "1"),
        CallText(0, "}"), CallText(1, "", "y", "now"), CallText(1, "{}"), Text("e"),
    ]  # fmt: skip
    whole = (Reasoning("ab"), Text("cd"), CallText(0, "{1}", "x", "add"), CallText(1, "{}", "y", "now"), Text("e"))
    assert merged(pieces) == whole
    assert merged(whole) == whole and merged([]) == ()


def test_a_part_of_another_kind_or_another_call_begins_anew() -> None:
    call = CallText(0, "{", "x", "add")
    assert goes_on(call, CallText(0, "}")) and not goes_on(call, CallText(1, "", "y", "now"))
    assert not goes_on(Text("a"), Reasoning("b")) and not goes_on(None, Text("a")) and not goes_on(call, Text("a"))
