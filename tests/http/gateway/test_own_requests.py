"""What a gateway asks for itself is bounded."""

from __future__ import annotations

import pytest

from engine.http.gateway import own_requests, shadow

from ...service.fakes import in_loop
from .fakes import Backend, before
from .test_shadow import ALL, until_counted


@pytest.mark.parametrize("whose", ["small", "large"])
@in_loop
async def test_of_long_answers_no_more_is_held_than_they_may_have(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow if whose == "small" else own_requests, "MOST_BYTES", 100)
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **ALL) as client:
        assert (await client.ask(model="auto")).words == small.words
        await until_counted(client, **({"dropped": 1} if whose == "small" else {"failed": 1}))
