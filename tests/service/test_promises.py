"""Which class a request is of."""

from __future__ import annotations

import pytest

from engine.contracts.config import SloClass, SloSettings
from engine.service.errors import ApiError
from engine.service.keys import Caller
from engine.service.promises import late, promise

CLASSES = {"chat": SloClass(500.0), "code": SloClass(100.0), "batch": SloClass(30_000.0)}
SETTINGS = SloSettings(CLASSES)


def caller(*classes: str) -> Caller:
    return Caller("ann", "0" * 64, slo=classes)


def name(settings: SloSettings, key: Caller | None, asked: str | None) -> str:
    found = promise(settings, key, asked)
    return "" if found is None else found.name


def test_the_usual_class_is_the_one_named_or_that_of_the_longest_target() -> None:
    assert name(SETTINGS, None, None) == "batch"
    assert name(SloSettings(CLASSES, "chat"), None, None) == "chat"
    assert promise(SloSettings(), None, None) is None


def test_without_keys_a_request_may_ask_for_any_class() -> None:
    assert name(SETTINGS, None, "code") == "code"


def test_a_key_gives_its_first_class_and_allows_its_others() -> None:
    key = caller("chat", "batch")
    assert (name(SETTINGS, key, None), name(SETTINGS, key, "batch")) == ("chat", "batch")
    with pytest.raises(ApiError, match=r"'code' is no class for this key .*; expected chat, batch\."):
        promise(SETTINGS, key, "code")


def test_a_key_without_classes_has_the_usual_one_alone() -> None:
    assert name(SETTINGS, caller(), None) == name(SETTINGS, caller(), "batch") == "batch"
    with pytest.raises(ApiError, match="expected batch"):
        promise(SETTINGS, caller(), "chat")


def test_a_class_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ApiError, match=r"'x' is no class of this server .*; expected chat, code, batch\."):
        promise(SETTINGS, None, "x")
    for key in (None, caller()):
        with pytest.raises(ApiError, match="expected no such header"):
            promise(SloSettings(), key, "chat")


def test_an_error_for_what_is_late_says_the_target_and_when_to_come_again() -> None:
    found = promise(SETTINGS, None, "code")
    assert found is not None
    error = late(found, "is expected after 4300 ms", 5)
    assert (error.kind, error.code, error.retry_after_s) == ("overloaded", "late", 5)
    assert "after 4300 ms; class code has 100 ms" in str(error)
    assert late(found, "was late", 10_000).retry_after_s == 30
