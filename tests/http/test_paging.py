"""Lists, page by page."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from engine.http.paging import limit_of, page
from engine.service.errors import ApiError


@pytest.mark.parametrize("limit", ["0", "101", "x", "-1", "1.0", "0000001", "²"])
def test_a_limit_that_makes_no_sense_is_refused(limit: str) -> None:
    with pytest.raises(ApiError, match="expected a number from 1 to 100") as error:
        limit_of(make_mocked_request("GET", f"/?limit={limit}"), most=100, default=20)
    assert error.value.param == "limit"


def test_a_page_says_whether_there_is_more() -> None:
    assert limit_of(make_mocked_request("GET", "/"), most=100, default=20) == 20
    assert page([{"id": "a"}, {"id": "b"}], 1) == {
        "object": "list",
        "data": [{"id": "a"}],
        "first_id": "a",
        "last_id": "a",
        "has_more": True,
    }
    assert page([], 1) == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
