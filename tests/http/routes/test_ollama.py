"""What Ollama's clients ask before they chat."""

from __future__ import annotations

import json

from ...service.fakes import MAX_LEN, MODEL, in_loop
from ..fakes import running


@in_loop
async def test_the_model_is_listed_shown_and_loaded() -> None:
    async with running() as server:
        _, _, version = await server.get("/api/version")
        _, _, tags = await server.get("/api/tags")
        _, _, loaded = await server.get("/api/ps")
        _, _, shown = await server.post("/api/show", {"model": f"{MODEL}:latest"})
        status, _, error = await server.post("/api/show", {"model": "other"})
    assert json.loads(version)["version"]
    assert [model["name"] for model in json.loads(tags)["models"]] == [MODEL]
    assert json.loads(loaded)["models"][0]["context_length"] == MAX_LEN
    found = json.loads(shown)
    assert found["capabilities"] == ["completion"] and found["template"] and found["details"]["format"] == "safetensors"
    assert status == 404 and json.loads(error).keys() == {"error"}
