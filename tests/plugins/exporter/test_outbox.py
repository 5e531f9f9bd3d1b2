"""What goes to a URL: in order, tried again where that may help, bounded, and counted."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from engine_plugins.exporter import outbox
from engine_plugins.exporter.outbox import Outbox, seconds_of

from .receiver import Reply, receiving

TOKEN = {"X-Token": "abc"}


def make(url: str, **options: object) -> Outbox[int]:
    given = {"headers": {}, "timeout_s": 5.0, "first_wait_s": 0.01} | options
    return Outbox(url, lambda items: json.dumps(list(items)).encode(), **given)  # type: ignore[arg-type]


def test_items_leave_in_order_with_the_headers_of_the_user():
    with receiving() as server:
        box = make(server.url + "/in?a=1", headers=TOKEN)
        for item in range(5):
            box.put(item)
        box.close()
        assert [item for posted in server.posted for item in json.loads(posted.body)] == [0, 1, 2, 3, 4]
        (path, headers, _) = server.posted[0]
        assert (path, headers["Content-Type"], headers["X-Token"]) == ("/in?a=1", "application/json", "abc")
        assert (box.sent, box.dropped) == (5, 0)


@pytest.mark.parametrize("status", outbox.TRY_AGAIN)
def test_a_server_that_is_busy_gets_the_same_body_again(status):
    with receiving(Reply(status), Reply(status, headers={"Retry-After": "0"})) as server:
        box = make(server.url)
        box.put(7)
        assert [posted.body for posted in server.wait(3)] == [b"[7]"] * 3
        box.close()
        assert (box.sent, box.dropped) == (1, 0)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500])
def test_what_a_server_refuses_is_dropped_and_counted(status):
    with receiving(Reply(status)) as server:
        box = make(server.url)
        box.put(7)
        server.wait(1)
        box.close()
        assert (len(server.posted), box.sent, box.dropped) == (1, 0, 1)


def test_a_server_that_takes_a_part_is_not_asked_again():
    with receiving(Reply(body=b"2")) as server:
        box = make(server.url, gather_s=5.0, refused=int)
        for item in range(3):
            box.put(item)
        box.close()
        assert (len(server.posted), box.sent, box.dropped) == (1, 1, 2)


def test_the_end_does_not_wait_for_a_server_that_is_away():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        box = make(f"http://127.0.0.1:{taken.getsockname()[1]}", first_wait_s=60.0)
        box.put(7)
        box.close()
        assert (box.sent, box.dropped) == (0, 1)


def test_what_has_no_room_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_PENDING", 3)
    with receiving() as server:
        box = make(server.url, gather_s=5.0)
        for item in range(5):
            box.put(item)
        box.close()
        assert (json.loads(server.posted[0].body), box.sent, box.dropped) == ([0, 1, 2], 3, 2)


def test_a_server_says_in_seconds_or_as_a_date_when_to_come_again():
    later = format_datetime(datetime.now(UTC) + timedelta(minutes=10), usegmt=True)
    assert seconds_of("120") == 120.0
    assert 590 < (seconds_of(later) or 0) <= 600
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert [seconds_of(text) for text in (None, "", "soon", "-1", "²")] == [None] * 5


def test_what_http_cannot_carry_is_dropped_and_counted():
    with receiving() as server:
        box = make(server.url, headers={"X-Token": "\u20ac"}, timeout_s=0.5)
        box.put(1)
        box.close()
        assert (len(server.posted), box.sent, box.dropped) == (0, 0, 1)
