"""The folder of a server's batches: whose it is, where it lies, and who runs what is in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.config import BatchSettings
from engine.service.admission import Admission
from engine.service.batches.batches import MOST_UNFINISHED, Batches, folder_of
from engine.service.batches.lines import Answered
from engine.service.batches.records import Batch
from engine.service.batches.store import DATABASE, Store
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError

from ..fakes import MODEL, ScriptedClient, in_loop, make_plan, make_tokenizer


async def never(*asked: Any) -> Answered:
    raise AssertionError("no engine is ready")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Batches]:
    engines = {"default": EngineHandle("default", make_plan(), ScriptedClient(), make_tokenizer())}
    settings = BatchSettings(path=str(folder))
    batches = Batches(settings, engines, Admission(8), never, ["/v1/x"], lambda event: None, 1000)
    await batches.start()
    try:
        yield batches
    finally:
        await batches.close()


def a_batch(name: str, model: str, **fields: Any) -> Batch:
    return Batch(name, "", model, "/v1/x", "file-1", 1, **{"expires_at": 2**40, **fields})


@in_loop
async def test_nothing_is_made_before_something_is_asked(tmp_path: Path) -> None:
    async with opened(tmp_path / "b"):
        assert not (tmp_path / "b").exists()
    async with opened(tmp_path / "b") as batches:
        assert await batches.call(lambda store: store.unfinished()) == []
        assert (tmp_path / "b" / DATABASE).exists()


@in_loop
async def test_a_batch_of_another_model_waits_for_a_server_that_has_it_unless_it_only_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as batches:
        for name, model, fields in (
            ("mine", MODEL, {"status": "in_progress", "total": 1}),
            ("other", "else", {"status": "in_progress", "total": 1}),
            ("cancelled", "else", {"status": "cancelling", "ends_as": "cancelled"}),
            ("late", "else", {"status": "in_progress", "expires_at": 5}),
        ):
            await batches.call(partial(Store.add, batch=a_batch(name, model, **fields)))
    async with opened(tmp_path) as batches:
        assert {*batches.runner._tasks} == {"mine", "cancelled", "late"}


@in_loop
async def test_a_second_server_is_told_whose_the_folder_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as first, opened(tmp_path) as second:
        await first.call(lambda store: None)
        with pytest.raises(ApiError, match=r"give this one a folder with batches.path=DIR") as error:
            await second.call(lambda store: None)
        assert error.value.kind == "unavailable"
    (tmp_path / "file").touch()
    async with opened(tmp_path / "file") as batches:
        with pytest.raises(ApiError, match="cannot be used"):
            await batches.call(lambda store: None)


@in_loop
async def test_no_more_batches_are_taken_than_can_be_watched(tmp_path: Path) -> None:
    async with opened(tmp_path) as batches:
        path = await batches.call(lambda store: store.new_path())
        path.write_bytes(b"x")
        file = await batches.call(lambda store: store.take(path, "", "f"))

        def fill(store: Any) -> None:
            for number in range(MOST_UNFINISHED):
                store.add(a_batch(str(number), MODEL))

        await batches.call(fill)
        with pytest.raises(ApiError, match="are under way"):
            await batches.create(file.id, "/v1/x", None, "", None)
        path.write_bytes(b"x")
        other = await batches.call(lambda store: store.take(path, "another", "f"))
        assert (await batches.create(other.id, "/v1/x", None, "another", None)).tenant == "another"


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert folder_of("auto") == Path("/s/engine/batches")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert folder_of("auto") == Path("/h/.local/state/engine/batches")
    assert folder_of("none") is None and folder_of("/x") == Path("/x")


@pytest.mark.parametrize(
    "fields",
    [{"path": "here"}, {"max_in_flight": 0}, {"quiet_s": -1.0}, {"max_lines": 0}, {"total_bytes": 0}],
)
def test_settings_that_make_no_sense_are_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match=f"batches.{next(iter(fields))}"):
        BatchSettings(**fields)
