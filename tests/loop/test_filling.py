"""Records are copied within a bound a step, each once, and are held until then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.loop.filling import LEAST_BYTES, Fill, LoadBound
from engine.step.plan import RecordMove


def test_each_record_is_taken_once_within_the_bound_and_let_go_when_it_was_copied() -> None:
    let_go: list[RecordMove] = []

    def end_holds(moves: Sequence[RecordMove]) -> None:
        let_go.extend(moves)

    fill = Fill([RecordMove(0, (1, 2, 3), (4, 5, 6)), RecordMove(1, (7, 8), (9, 10))], (10, 25), end_holds)
    assert fill.num_bytes == 80
    first, copied = fill.take(most_bytes=29)
    assert first == (RecordMove(0, (1, 2), (4, 5)),) and let_go == []
    copied()
    assert let_go == [*first]
    second, _ = fill.take(most_bytes=1)
    assert second == (RecordMove(0, (3,), (6,)),), "one at least"
    third, _ = fill.take(most_bytes=25)
    assert third == (RecordMove(1, (7,), (9,)),)
    fill.give_up()
    assert let_go == [*first, RecordMove(1, (8,), (10,))] and fill.num_bytes == 0


def test_rows_that_decode_wait_for_a_tenth_of_their_step_whatever_copies_take() -> None:
    bound = LoadBound((10**5, 10**6))
    moves = [RecordMove(0, tuple(range(10)), tuple(range(10))), RecordMove(1, (0, 1), (0, 1))]
    for rate in (30e9, 0.4e9, 3e9):
        for _ in range(30):
            bound.observe(moves, 3e6 / rate * 1e3)
        assert bound.most_bytes(30.0) == pytest.approx(3e-3 * rate, rel=0.01)
    assert bound.most_bytes(0.01) == bound.most_bytes(0.0) == LEAST_BYTES, "loads progress"
