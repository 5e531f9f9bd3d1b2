"""Answers of blocks: however an output is cut into deltas, each block is opened, filled and closed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.http.blocks import BlockFormat, Event
from engine.service.errors import ApiError
from engine.service.output import Delta
from engine.service.parts import CallText, Part, Text, merged


class Written(BlockFormat):
    """Notes what it is asked to write."""

    def begun(self) -> Iterator[Event]:
        yield {"type": "begun"}

    def opened(self, index: int, part: Part) -> Iterator[Event]:
        yield {"type": "opened", "index": index}

    def grown(self, index: int, part: Part, delta: Delta) -> Iterator[Event]:
        yield {"type": "grown", "index": index, "part": part}

    def closed(self, index: int, block: Part, is_whole: bool) -> Iterator[Event]:
        yield {"type": "closed", "index": index, "part": block, "whole": is_whole}

    def ended(self, delta: Delta) -> Iterator[Event]:
        yield {"type": "ended"}

    def whole(self, outputs: Sequence[Delta]) -> bytes:
        return b""

    @staticmethod
    def broken(error: ApiError) -> bytes:
        return b""


def written(deltas: Sequence[Delta]) -> tuple[list[dict[str, Any]], list[Part]]:
    form = Written.__new__(Written)
    form.blocks, form._open, form._begun = [], [], False
    return [each for delta in deltas for each in form._events(delta)], form.blocks


texts = st.builds(Text, st.text("ab", min_size=1, max_size=2))
calls = st.builds(CallText, st.just(0), st.text("{}", max_size=2), st.sampled_from(["", "x"]))


@given(st.lists(st.lists(texts | calls, max_size=3), min_size=1, max_size=4), st.sampled_from(["stop", "length"]))
def test_each_block_is_opened_filled_and_closed_once(pieces: list[list[Part]], reason: Any) -> None:
    deltas = [Delta(0, tuple(parts)) for parts in pieces]
    deltas[-1] = Delta(0, tuple(pieces[-1]), finish_reason=reason)
    found, blocks = written(deltas)
    assert tuple(blocks) == merged([part for parts in pieces for part in parts])
    assert [each["type"] for each in found].count("begun") == 1 and found[0]["type"] == "begun"
    assert found[-1]["type"] == "ended"
    for index, block in enumerate(blocks):
        mine = [each for each in found if each.get("index") == index]
        assert [each["type"] for each in mine][:: len(mine) - 1] == ["opened", "closed"]
        assert mine[-1]["whole"] == (index < len(blocks) - 1 or reason == "stop") and mine[-1]["part"] == block
        assert merged([each["part"] for each in mine[1:-1]]) == (block,)
