"""Where a request is tried, in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.contracts.config import ProviderSettings
from engine.contracts.router import ApiRequest, Attempts
from engine.service.attempts import Order
from engine.service.first_byte import FEWEST, STALE_S, FirstByteModel
from engine.service.targets import MOST_FAILURES, Target
from engine.testing.router import REQUEST

TOKENS = 8
API = ApiRequest(**{name: getattr(REQUEST, name) for name in REQUEST.__slots__} | {"prompts": ((1,) * TOKENS,)})


@dataclass
class Routers:
    """Places at targets from the last to the first."""

    placed: list[tuple[str, str]] = field(default_factory=list)
    sent: list[tuple[str, str]] = field(default_factory=list)

    def place(self, api: ApiRequest, targets: list[Target]) -> Attempts:
        self.placed.append((api.model, "".join(target.id for target in targets)))
        return Attempts(tuple([target.id for target in targets if target.takes_requests][::-1]), "the last", (3,))

    def begun(self, api: ApiRequest, target: str) -> None:
        self.sent.append((api.model, target))


def own(name: str, *models: str, **facts: Any) -> Target:
    target = Target("http://h", name)
    target.is_ready(dict.fromkeys(models or ("m",), facts))
    return target


def provider(name: str, *models: str, **settings: Any) -> Target:
    return Target.of(name, ProviderSettings("http://h/v1", {m: f"their-{m}" for m in models or ("m",)}, **settings))


class Asking:
    """An order, and a clock that a test moves."""

    def __init__(self, models: dict[str, list[Target]], patience_s: float = 2.0) -> None:
        self.now_s = 0.0
        self.routers = Routers()
        self.order = Order(API, models, self.routers, patience_s=patience_s, clock=lambda: self.now_s)

    def all(self) -> str:
        """The targets that are tried, all of which fail."""
        tried = []
        while (one := self.order.next()) is not None:
            tried.append(f"{one.model}{one.target.id}")
        return " ".join(tried)


def test_own_targets_are_tried_as_the_router_says_and_then_providers_in_their_order() -> None:
    asking = Asking({"m": [own("a"), own("b"), provider("p"), provider("q")]})
    assert asking.all() == "mb ma mp mq"
    assert asking.routers.placed == [("m", "ab")] and asking.routers.sent == [("m", "b"), ("m", "a")]


def test_models_are_tried_one_after_the_other_and_placed_only_then() -> None:
    asking = Asking({"m": [own("a")], "n": [own("b", "n"), provider("p", "n")]})
    first = asking.order.next()
    assert first is not None and (first.model, first.cached_tokens, first.reason) == ("m", 3, "the last")
    assert asking.routers.placed == [("m", "a")]
    assert asking.all() == "nb np" and asking.routers.placed == [("m", "a"), ("n", "b")]


def test_targets_that_take_no_requests_are_left_out_and_tried_when_they_come_back() -> None:
    a, b = own("a"), own("b")
    a.is_down("cannot be reached", lets_go=False)
    asking = Asking({"m": [a, b]})
    assert asking.all() == "mb"
    a.is_ready({"m": {}})
    assert asking.all() == "ma"


def test_a_provider_takes_over_where_no_own_target_is_up_and_no_router_is_asked() -> None:
    a = own("a")
    a.is_down("cannot be reached", lets_go=False)
    asking = Asking({"m": [a, provider("p")]})
    assert asking.all() == "mp" and not asking.routers.placed


def test_with_again_what_was_tried_is_tried_again_the_last_one_last() -> None:
    asking = Asking({"m": [own("a"), own("b")]})
    assert asking.all() == "mb ma"
    again = [asking.order.next(again=True) for _ in range(3)]
    assert [one and one.target.id for one in again] == ["b", "a", "b"]


def test_before_another_model_the_last_target_is_tried_once_more_when_it_asked_for_it() -> None:
    asking = Asking({"m": [own("a")], "n": [own("b", "n")]})
    first = asking.order.next()
    assert first is not None
    asking.order.failed(first, 1.5)
    assert asking.order.next() is None and asking.order.waits
    asking.now_s = 1.5
    assert not asking.order.waits and asking.order.next() is first
    asking.order.failed(first, 0.0)
    assert asking.all() == "nb", "once more is enough"


def test_other_targets_of_the_model_come_before_a_second_try() -> None:
    asking = Asking({"m": [own("a"), own("b")], "n": [own("c", "n")]})
    for expected in ("b", "a", "a", "c"):
        one = asking.order.next()
        assert one is not None and one.target.id == expected
        asking.order.failed(one, 0.0)


@pytest.mark.parametrize(("patience_s", "waits"), [(2.0, False), (5.0, True)])
def test_a_second_try_waits_for_a_rest_that_another_request_prolonged(patience_s: float, waits: bool) -> None:
    a = provider("a")
    asking = Asking({"m": [a], "n": [own("b", "n")]}, patience_s)
    first = asking.order.next()
    assert first is not None
    a.rest(1.0)
    asking.order.failed(first, 1.0)
    assert asking.order.next() is None and asking.order.waits
    a.rest(1.5)
    asking.now_s = 1.0  # the first rest would be over, the second one is not
    found = asking.order.next()
    assert asking.order.waits == waits and (found and found.target.id) == (None if waits else "b")
    a.rests_until_s, asking.now_s = 0.0, 3.0
    if waits:
        assert asking.order.next() is first


@pytest.mark.parametrize("again_in_s", [2.5, 60.0])
def test_nobody_waits_longer_than_patience_says(again_in_s: float) -> None:
    asking = Asking({"m": [own("a")], "n": [own("b", "n")]})
    first = asking.order.next()
    assert first is not None
    asking.order.failed(first, again_in_s)
    assert asking.all() == "nb"


def test_the_last_model_is_not_tried_twice() -> None:
    asking = Asking({"m": [own("a")]})
    first = asking.order.next()
    assert first is not None
    asking.order.failed(first, 0.0)
    assert asking.all() == "" and not asking.order.waits


@pytest.mark.parametrize(
    ("lengths", "tried"),
    [((8, 4), "ma"), ((4, 8), "ma mb"), ((None, 4), "ma mb"), ((4, None), "ma mb"), ((4, 4), "ma")],
)
def test_a_prompt_that_is_too_long_goes_only_where_there_may_be_more_room(
    lengths: tuple[int | None, int | None], tried: str
) -> None:
    a, b = [own(name, max_model_len=length) for name, length in zip("ab", lengths, strict=True)]
    asking = Asking({"m": [b, a]})
    first = asking.order.next()
    assert first is not None
    asking.order.too_long(first)
    assert f"ma {asking.all()}".strip() == tried


def test_a_prompt_that_is_too_long_for_a_model_goes_to_a_longer_one() -> None:
    asking = Asking({"m": [own("a", max_model_len=4)], "n": [own("b", "n", max_model_len=8)]})
    first = asking.order.next()
    assert first is not None
    asking.order.too_long(first)
    assert asking.all() == "nb"


def test_a_provider_takes_what_would_wait_too_long() -> None:
    a = own("a")
    for tokens in range(100):
        a.first_byte.add(tokens, 10.0 * tokens)
    calm, full = provider("p", overflow_ms=500.0), provider("q", overflow_ms=500.0)
    assert Asking({"m": [a, calm]}).all() == "ma mp"
    a.load.queued_tokens = 90
    asking = Asking({"m": [a, calm, full, provider("r")]})
    first = asking.order.next()
    assert first is not None and first.target is calm and "950 ms expected at a" in first.reason
    assert asking.all() == "mq ma mr"
    for _ in range(MOST_FAILURES):
        calm.breaker.failed()
    assert Asking({"m": [a, calm]}).all() == "ma", "one that rests is no help"


def test_an_idle_target_that_was_slow_is_given_a_request_now_and_then() -> None:
    a, p, now_s = own("a"), provider("p", overflow_ms=500.0), 0.0
    a.first_byte = FirstByteModel(clock=lambda: now_s)
    for _ in range(FEWEST):
        a.first_byte.add(TOKENS, 1000.0)
    assert Asking({"m": [a, p]}).all() == "mp ma"
    now_s = STALE_S + 1.0
    assert Asking({"m": [a, p]}).all() == "ma mp"
    a.load.sequences = 1
    assert Asking({"m": [a, p]}).all() == "mp ma", "one request at a time"
    a.load.sequences = 0
    a.first_byte.add(TOKENS, 1000.0)
    assert Asking({"m": [a, p]}).all() == "mp ma", "it is as slow as before"


def test_what_has_begun_keeps_no_prompt() -> None:
    asking = Asking({"m": [own("a")]})
    asking.order.next()
    asking.order.forget()
    assert not asking.order.targets and asking.order.prompt_tokens == TOKENS
