"""What a client is told where no target answers."""

from __future__ import annotations

import pytest
from aiohttp import web

from engine.http.errors import status_of
from engine.http.gateway.failures import code_of, is_error, is_object, nobody, refused_key, timed_out, words_for
from engine.service.targets import Target


def ready() -> Target:
    target = Target.at("http://h:1")
    target.is_ready({"m": {}})
    return target


def test_where_nobody_takes_requests_each_targets_reason_is_said() -> None:
    target = ready()
    target.drain()
    error = nobody([target, Target.at("http://h:2")])
    assert status_of(error) == 503 and "h:1: draining, h:2: not asked yet" in error.message


def test_where_targets_asked_for_a_rest_clients_are_told_when_the_first_one_ends() -> None:
    one, other = ready(), ready()
    one.rest(30.0)
    other.rest(7.0)
    error = nobody([one, other, Target.at("http://h:2")])
    assert (status_of(error), error.retry_after_s) == (429, 7)


def test_a_refused_key_is_named_by_its_setting_and_never_itself() -> None:
    error = refused_key(Target.at("http://h:1", "sesame"), 401)
    assert status_of(error) == 502 and "gateway.key_env" in error.message and "sesame" not in error.message


@pytest.mark.parametrize(
    ("why", "code"), [("silent", "target_silent"), ("late", "request_timeout"), ("", "target_timeout")]
)
def test_each_time_limit_has_a_code(why: str, code: str) -> None:
    assert timed_out(why).code == code and status_of(timed_out(why)) == 504


@pytest.mark.parametrize(
    ("data", "code", "fits"),
    [
        (b'{"error": {"code": "c"}}', "c", True),
        (b'{"error": "c"}', None, True),
        (b"[]", None, False),
        (b"\xff", None, False),
        (b"{", None, False),
    ],
)
def test_bodies_may_be_anything(data: bytes, code: str | None, fits: bool) -> None:
    assert code_of(data) == code and is_object(data) is fits


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"error": "no"}', True),
        (b'{"type": "error", "error": {"message": "no"}}', True),
        (b'{"message": "no", "error": {}}', True),
        (b'{"error": null}', False),
        (b'{"error": {"message": "content filter"}, "choices": []}', False),
        (b'{"id": "resp_1", "status": "failed", "error": {"code": "c"}, "output": []}', False),
        (b'[{"error": "no"}]', False),
    ],
)
def test_an_error_with_a_part_of_an_answer_is_an_answer(data: bytes, says: bool) -> None:
    assert is_error(data) is says


def test_the_log_has_a_status_or_what_the_client_is_told() -> None:
    assert words_for(web.Response(status=503)) == "status 503"
    assert words_for(timed_out("")) == "No server began to answer this request in time."
