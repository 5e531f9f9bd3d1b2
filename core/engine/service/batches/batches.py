"""Files and batches of a server, for those who ask: the store on a thread of its own, and the runner."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from engine.contracts.config import BatchSettings
from engine.contracts.events import Event
from engine.service.admission import Admission
from engine.service.batches.idle import Idle
from engine.service.batches.records import WINDOW_S, Batch
from engine.service.batches.runner import Answer, Runner
from engine.service.batches.store import DATABASE, DiskFull, Store, new_id, now
from engine.service.database import InUse
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError, bad_request
from engine.service.keys import Caller

T = TypeVar("T")
MOST_UNFINISHED = 200
"""Batches of all tenants that may be under way at a time."""

log = structlog.get_logger("engine.batches")


def folder_of(path: str) -> Path | None:
    """Of ``batches.path``; ``None``: there is none."""
    if path == "none":
        return None
    if path != "auto":
        return Path(path)
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "engine" / "batches"


def disk_full() -> ApiError:
    return ApiError("unavailable", "The disk of this server is full.", code="disk_full", retry_after_s=30)


class Batches:
    """The folder is opened when something is asked of it, or at the start if there is one. Use on the event loop's
    thread only."""

    def __init__(
        self,
        settings: BatchSettings,
        engines: Mapping[str, EngineHandle],
        admission: Admission,
        answer: Answer,
        endpoints: Collection[str],
        publish: Callable[[Event], None],
        most_bytes: int,
        is_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        """``endpoints``: paths that a batch may have. ``most_bytes``: of one line. ``is_asleep``: as :class:`Idle`."""
        self.settings = settings
        self.uploading: Counter[str] = Counter()
        """Bytes that are being written, by tenant."""
        self._folder = folder_of(settings.path)
        self._model = next(iter(engines.values())).model
        self._endpoints = endpoints
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(1, "batches")
        idle = Idle(engines, admission, settings.max_in_flight, settings.quiet_s, is_asleep)
        self.runner = Runner(self._call, answer, idle, publish, settings.max_lines, most_bytes)

    async def start(self) -> None:
        """Go on with what an earlier process has left."""
        if self._folder is not None and (self._folder / DATABASE).exists():
            try:
                await self.call(lambda store: None)
            except ApiError as error:
                log.warning("no batches here", reason=error.message)

    async def close(self) -> None:
        """Lines in flight are left for the next process. Idempotent."""
        await self.runner.close()
        if self._store is not None:
            await self._call(Store.close)
            self._store, self._folder = None, None
        self._thread.shutdown(wait=False)

    async def call(self, function: Callable[[Store], T]) -> T:
        """Raises :class:`ApiError` as the store does, and ``unavailable`` where there is none or its disk is full."""
        if self._store is None:
            await self._open()
        try:
            return await self._call(function)
        except DiskFull:
            raise disk_full() from None

    async def _call(self, function: Callable[[Store], T]) -> T:
        def called() -> T:
            assert self._store is not None
            return function(self._store)

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    async def _open(self) -> None:
        folder = self._folder
        if folder is None:
            raise ApiError("not_found", "This server has no batches (batches.path=none).", code="no_batches")

        def opened() -> list[Batch]:
            if self._store is None:
                self._store = Store(folder)
                return self._store.unfinished()
            return []

        try:
            left = await asyncio.get_running_loop().run_in_executor(self._thread, opened)
        except InUse:
            message = f"Another server has the batches in {folder}; give this one a folder with batches.path=DIR."
            raise ApiError("unavailable", message, code="batches_in_use") from None
        except (OSError, sqlite3.Error) as error:
            log.error("batches cannot be opened", folder=str(folder), error=str(error))
            raise ApiError("unavailable", f"batches.path={folder} cannot be used.", code="batches_unusable") from None
        for batch in left:
            needs_model = batch.status in ("validating", "in_progress") and batch.expires_at > now()
            if batch.model == self._model or not needs_model:
                self.runner.begin(batch)
            else:
                log.warning("a batch waits for a server with its model", batch=batch.id, model=batch.model)

    async def create(
        self,
        file: str,
        endpoint: str,
        metadata: dict[str, str] | None,
        tenant: str,
        caller: Caller | None,
        window_s: int = WINDOW_S,
    ) -> Batch:
        """Raises :class:`ApiError`."""
        if endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise bad_request(f"endpoint is {endpoint[:64]!r}; expected one of {known}.", "endpoint", "invalid_value")
        created = now()
        batch = Batch(
            new_id("batch_"),
            tenant,
            self._model,
            endpoint,
            file,
            created,
            created + window_s,
            metadata=metadata,
            max_sequences=None if caller is None else caller.max_sequences,
        )

        def added(store: Store) -> None:
            if store.file(file, tenant).purpose != "batch":
                raise bad_request("input_file_id: expected a file with purpose 'batch'.", "input_file_id")
            if sum(each.tenant == tenant for each in store.unfinished()) >= MOST_UNFINISHED:
                message = f"{MOST_UNFINISHED} batches are under way; wait for one to end."
                raise ApiError("overloaded", message, code="too_many_batches", retry_after_s=30)
            store.add(batch)

        await self.call(added)
        self.runner.begin(batch)
        return batch

    async def cancel(self, name: str, tenant: str) -> Batch:
        """Raises :class:`ApiError`."""
        batch = await self.call(lambda store: store.cancel(name, tenant))
        if not batch.is_over:
            await self.runner.again(batch)
        return batch
