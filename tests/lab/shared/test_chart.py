from __future__ import annotations

import re

import pytest

from engine_lab.shared.chart import HEIGHT, MOST_POINTS, WIDTH, Series, chart, ticks
from engine_lab.shared.document import document
from engine_lab.shared.markup import tag


@pytest.mark.parametrize("high", [0.003, 0.9, 1.0, 7.2, 43.0, 100.0, 1234.5])
def test_ticks_are_round_and_reach_the_largest_value(high):
    found = ticks(high)
    assert found[0] == 0 and found[-1] >= high * (1 - 1e-9) and 3 <= len(found) <= 8


def test_points_and_marks_lie_inside_of_the_chart_and_of_many_points_some_are_drawn():
    many = Series("dots <b>", [(i, i % 7) for i in range(10 * MOST_POINTS)], is_line=False)
    picture = chart("t", "x", [many, Series("one", [(3.0, 90.0)])], x_mark=(5.0, "knee"), y_mark=(100.0, "100 ms"))
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([^"]+)" cy="([^"]+)"', picture)]
    assert MOST_POINTS / 2 < len(places) <= MOST_POINTS + 1
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)
    assert "knee" in picture and "100 ms" in picture and "<b>" not in picture
    assert "<svg" in chart("nothing", "x", [Series("none", [])])


def test_text_of_the_data_cannot_end_the_element_that_holds_it():
    text = document("a < b", [tag("p", "</p><script>")], {"x": "</script><script>alert(1)"})
    assert text.count("<script") == text.count("</script") == 1
