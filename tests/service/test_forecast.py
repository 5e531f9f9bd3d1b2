"""First tokens are foretold from what waits, and nobody is refused on a guess."""

from __future__ import annotations

from engine.contracts.config import SloClass
from engine.service.forecast import FEWEST_ERRORS, Expected, Forecast
from engine.service.promises import Promise

CODE, CHAT, BATCH = Promise("code", SloClass(100.0)), Promise("chat", SloClass(500.0)), Promise("batch", SloClass(3e4))


class Engine:
    """Computes prompts one after the other, a token in a millisecond, 10 ms before each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.forecast = Forecast(10.0, lambda: self.now)
        self.queue: list[Expected] = []

    def send(self, promise: Promise, tokens: int) -> Expected:
        expected = self.forecast.expect(promise, tokens)
        self.forecast.sent(expected)
        self.queue.append(expected)
        return expected

    def serve(self) -> None:
        while self.queue:
            expected = self.queue.pop(0)
            self.now += 0.01 + expected.tokens / 1e3
            self.forecast.first_token(expected)

    def learn(self, promise: Promise = CHAT, rounds: int = 2 * FEWEST_ERRORS) -> None:
        for number in range(rounds):
            for tokens in (20, 40, 60 + number % 40):
                self.send(promise, tokens)
            self.serve()
            self.now += 0.001


def test_what_waits_before_a_request_says_when_its_first_token_comes() -> None:
    engine = Engine()
    assert engine.forecast.expect(CHAT, 100).ms is None
    engine.learn()
    alone = engine.forecast.expect(CHAT, 100).ms
    engine.send(CHAT, 200)
    behind = engine.forecast.expect(CHAT, 100)
    assert alone is not None and behind.ms is not None and behind.ahead == 200
    assert abs(alone - 110) < 20 and abs(behind.ms - 320) < 40
    (summary,) = engine.forecast.summary().values()
    assert summary["predictions"] > FEWEST_ERRORS and summary["error_p90_ms"] < 30


def test_only_what_is_due_before_is_waited_for() -> None:
    engine = Engine()
    engine.send(BATCH, 1000)
    assert engine.forecast.expect(CODE, 10).ahead == 0 and engine.forecast.expect(BATCH, 10).ahead == 1000
    engine.send(CHAT, 100)
    assert engine.forecast.expect(CODE, 10).ahead == 0
    engine.now = 0.45
    assert engine.forecast.expect(CODE, 10).ahead == 100, "due before a code request that comes now"
    engine.now = 0.6
    assert engine.forecast.expect(CODE, 10).ahead == 0, "late: it makes way"


def test_nobody_is_refused_before_the_errors_are_known() -> None:
    engine = Engine()
    for _ in range(5):
        engine.learn(rounds=1)
    engine.send(CHAT, 5000)
    assert not engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100))


def test_who_comes_too_late_is_told_and_who_does_not_is_served() -> None:
    engine = Engine()
    engine.learn()
    engine.send(CHAT, 200)
    assert not engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100))
    assert engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100), elapsed_ms=300.0)
    engine.send(CHAT, 300)
    assert engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100))


def test_what_an_idle_engine_could_serve_is_never_refused_however_long_it_is() -> None:
    engine = Engine()
    engine.learn()
    assert not engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100_000))


def test_an_engine_that_got_faster_is_found_out() -> None:
    """By those before whom nobody waits."""
    engine = Engine()
    engine.learn()
    waits = engine.send(CHAT, 600)
    engine.now += 60.0
    assert engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100)), "however long nothing came in time"
    engine.forecast.end(waits)
    for _ in range(200):
        alone = engine.forecast.expect(CHAT, 500)
        assert not engine.forecast.is_too_late(alone)
        engine.forecast.sent(alone)
        engine.now += 0.02
        engine.forecast.first_token(alone)
    engine.forecast.sent(engine.forecast.expect(CHAT, 600))
    assert not engine.forecast.is_too_late(engine.forecast.expect(CHAT, 100))


def test_late_ones_teach_nothing_about_those_in_time() -> None:
    engine = Engine()
    engine.learn()
    before = engine.forecast.expect(CHAT, 100).ms
    for _ in range(50):
        expected = engine.send(CHAT, 50)
        engine.queue.clear()
        engine.now += 8.0
        engine.forecast.first_token(expected)
    assert engine.forecast.expect(CHAT, 100).ms == before


def test_late_ones_do_not_hide_how_much_sooner_those_in_time_may_come() -> None:
    """Where most are late, a percentile of all errors would be theirs."""
    engine = Engine()
    engine.learn()
    for number in range(3000):
        expected = engine.send(CHAT, 150)
        engine.queue.clear()
        engine.now += 8.0 if number % 10 else 0.22 if number % 30 else 0.4
        engine.forecast.first_token(expected)
    engine.forecast.sent(engine.forecast.expect(CHAT, 50))
    asked = engine.forecast.expect(CHAT, 100)
    assert asked.ms is not None
    assert not engine.forecast.is_too_late(asked, elapsed_ms=530.0 - asked.ms), "two of three come 60 ms sooner"
    assert engine.forecast.is_too_late(asked, elapsed_ms=600.0 - asked.ms)


def test_who_has_ended_is_not_waited_for() -> None:
    engine = Engine()
    gone = engine.send(CHAT, 300)
    engine.forecast.end(gone)
    engine.forecast.end(gone)
    assert engine.forecast.expect(CHAT, 10).ahead == 0
    engine.forecast.first_token(gone)
    assert not engine.forecast.summary().get("chat", {}).get("predictions")
