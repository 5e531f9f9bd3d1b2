"""Windows of a running engine: how long they are, and which requests are looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_lab.doctor import recording
from engine_lab.doctor.recording import ENOUGH, sampled


class Scripted:
    """An engine that ends so many requests each second of a clock of its own."""

    def __init__(self, rate: float, running: int) -> None:
        self.rate, self.running, self.now_s = rate, running, 0.0

    async def json(self, path: str) -> Any:
        if path == "/engine/stats":
            return {"running": self.running, "waiting": 0}
        ended = {"stop": 0.0, "length": int(self.rate * self.now_s)}
        return {"metrics": [{"name": "engine_requests_total", "kind": "counter", "unit": "", "help": "", "engine": "a",
                             "label": "finish_reason", "values": ended}]}  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "running", "seconds"),
    [(2.0, 3, 5.0), (0.5, 3, 20.0), (0.01, 3, 60.0), (0.0, 0, 5.0)],
    ids=["many end", "a slow engine", "hardly any end", "nobody is served"],
)
def test_a_window_goes_on_until_enough_requests_have_ended(
    rate: float, running: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Scripted(rate, running)

    async def sleep(slept_s: float) -> None:
        engine.now_s += slept_s

    monkeypatch.setattr(recording.asyncio, "sleep", sleep)
    monkeypatch.setattr(recording.time, "monotonic", lambda: engine.now_s)
    asyncio.run(recording._enough(engine, {}, 5.0, recording.LONGEST_S, lambda text: None))
    assert engine.now_s == seconds and (rate < 1.0 or rate * seconds >= ENOUGH)


def test_few_long_prompts_are_looked_at_among_many_short_ones() -> None:
    requests = [{"prompt_tokens": 1100 if number % 50 == 0 else 60, "number": number} for number in range(200)]
    found = sampled(requests)
    assert len(found) <= recording.MOST_DETAILS
    assert sum(each["prompt_tokens"] == 1100 for each in found) == 4
    assert max(each["number"] for each in found if each["prompt_tokens"] == 60) > 150
    assert sampled([]) == []
