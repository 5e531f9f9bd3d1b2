"""Records are copied within a bound a step, each once, and are held until then."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop.filling import Fill
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
