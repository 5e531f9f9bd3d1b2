"""What targets are sent of a request, and what is left as the client wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.contracts.config import ProviderSettings
from engine.http.bodies import Bodies, Body
from engine.http.chat_format import ChatFormat
from engine.http.gateway.asked import Asked, Terms
from engine.http.gateway.state import Chosen
from engine.service.attempts import Attempt
from engine.service.targets import Target

BODY = b'{"model": "auto",  "messages": [], "cache_salt": "mine", "x": 1.50}'


def asked(name: str, salt: str | None = None, stream: bool = False) -> Asked:
    nothing: Any = None
    body = Body(Bodies(1024), "a")
    body.data = BODY
    terms = Terms({} if salt is None else {"cache_salt": salt})
    return Asked(nothing, nothing, nothing, "chat", Chosen(name, {}), 1, stream, False, terms, body, ChatFormat)


def test_a_body_of_which_nothing_changes_is_sent_as_it_came() -> None:
    assert asked("auto").body_for(Attempt("auto", Target.at("http://a:1"))) is BODY


@pytest.mark.parametrize("salt", [None, "theirs"])
def test_another_model_and_the_salt_of_a_tenant_are_put_in(salt: str | None) -> None:
    data = asked("auto", salt).body_for(Attempt("small", Target.at("http://a:1")))
    assert json.loads(data) == {"model": "small", "messages": [], "cache_salt": salt or "mine", "x": 1.5}
    assert b"1.50" in data, "numbers stay as they were written"


def test_a_provider_is_asked_for_the_usage_of_a_stream() -> None:
    provider = Target.of("p", ProviderSettings("http://p", {"auto": "their/model"}))
    found = json.loads(asked("auto", "theirs", stream=True).body_for(Attempt("auto", provider)))
    assert found == {"model": "their/model", "messages": [], "x": 1.5, "stream_options": {"include_usage": True}}
