from __future__ import annotations

import json

import pytest

from engine.contracts.config import SloClass, SloSettings

from ...service.fakes import in_loop
from ..fakes import chat, running

CHAT = "/v1/chat/completions"


@in_loop
async def test_the_last_hour_is_told_with_its_targets_by_class() -> None:
    async with running(slo=SloSettings({"chat": SloClass(150.0, itl_ms=30.0), "code": SloClass(900.0)})) as server:
        for slo_class in ("chat", "code", "code"):
            assert (await server.post(CHAT, chat(), f"X-SLO-Class: {slo_class}"))[0] == 200
        found = {name: json.loads((await server.get(f"/engine/history{name}"))[2]) for name in ("", "?class=code")}
        assert [sum(each["columns"]["requests"]) for each in found.values()] == [3, 2]
        assert found[""]["targets"] == {"ttft_ms": None, "itl_ms": None}, "one for each class"
        assert found["?class=code"]["targets"]["ttft_ms"] == 900.0 and found[""]["classes"] == ["chat", "code"]
        later = json.loads((await server.get(f"/engine/history?since={found['']['now'] + 1000}"))[2])
        assert later["first"] == later["now"], "of a server that started again"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("since=x", "since='x': expected the number of a period."),
        ("since=" + "9" * 40, "expected the number of a period."),
        ("class=chat", "class='chat': expected one of slo.classes (none)."),
    ],
)
@in_loop
async def test_an_odd_question_is_refused(query: str, says: str) -> None:
    async with running() as server:
        status, _, data = await server.get(f"/engine/history?{query}")
        assert status == 400 and says in json.loads(data)["error"]["message"]
