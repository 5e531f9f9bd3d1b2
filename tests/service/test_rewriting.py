"""Bodies for other servers."""

from __future__ import annotations

import json

import pytest

from engine.service.rewriting import rewritten


def test_the_model_is_renamed_and_other_values_stay_as_they_were_written() -> None:
    body = b'{"model": "ours", "temperature": 0.10000000000000000001, "x": {"model": "ours"}, "t": "\\u00e9"}'
    found = rewritten(body, {"model": "th\u00e9irs"})
    assert json.loads(found) == json.loads(body) | {"model": "th\u00e9irs"}
    assert b"0.10000000000000000001" in found and b"\\u00e9" in found


def test_a_body_without_a_model_gets_one() -> None:
    assert json.loads(rewritten(b"{}", {"model": "m"})) == {"model": "m"}


def test_fields_that_would_be_refused_are_dropped() -> None:
    assert json.loads(rewritten(b'{"priority": 1, "n": 2}', {"model": "m"}, drop=["priority"])) == {
        "n": 2,
        "model": "m",
    }


def test_usage_is_asked_for_beside_other_options() -> None:
    asked = json.loads(rewritten(b'{"stream_options": {"include_obfuscation": false}}', {"model": "m"}, usage=True))
    assert asked["stream_options"] == {"include_obfuscation": False, "include_usage": True}
    for options in (b"null", b'{"include_usage": false}', b"{}"):
        asked = json.loads(rewritten(b'{"stream_options": ' + options + b"}", {"model": "m"}, usage=True))
        assert asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("options", [b"7", b"[]", b'"x"', b"[1e999]", b'"\xff"', b"false"])
def test_options_of_another_type_are_for_the_other_server_to_refuse(options: bytes) -> None:
    body = b'{"stream_options":' + options + b"}"
    assert rewritten(body, {"model": "m"}, usage=True) == body[:-1] + b',"model":"m"}'
