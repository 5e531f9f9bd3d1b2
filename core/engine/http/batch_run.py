"""A batch without a listener: engines are started for one file, and end with it."""

from __future__ import annotations

import asyncio
import filecmp
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from engine.assembly.plan import EnginePlan
from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine.http.listener import to_stderr
from engine.http.server import Server, make_server
from engine.service import logs
from engine.service.batches.lines import first_url
from engine.service.batches.records import Batch
from engine.service.batches.store import Store
from engine.service.errors import ApiError

TELL_S = 10.0
"""How often it is said how far the batch is."""
NO_WINDOW_S = 10 * 365 * 24 * 3600
"""Nobody waits for it."""


class BatchRun(Server):
    """See :func:`run_batch`."""

    file: Path
    output: Path
    code: int | None = None
    """Once it has ended by itself."""

    @property
    def ready(self) -> str:
        return f"ready: {self.state.engine.model}"

    async def listen(self) -> None:
        asyncio.get_running_loop().set_exception_handler(logs.on_loop_error)
        self.app = self.build()
        self._runner = web.AppRunner(self.app)
        await self._runner.setup()

    async def close(self) -> None:
        await self.end()
        await self._runner.cleanup()

    async def work(self) -> int:
        engines, batch = asyncio.create_task(super().work()), asyncio.create_task(self._batch())
        try:
            done, _ = await asyncio.wait({engines, batch}, return_when=asyncio.FIRST_COMPLETED)
            self.code = (engines if engines in done else batch).result()
            return self.code
        finally:
            engines.cancel()
            batch.cancel()
            await asyncio.gather(engines, batch, return_exceptions=True)

    async def _batch(self) -> int:
        try:
            batch = await self._begin()
        except (ApiError, OSError) as error:
            self._say(f"error: {error}")
            return USAGE
        while not batch.is_over:
            if not batch.total or batch.completed + batch.failed:
                self._tell(batch)
            await asyncio.wait({asyncio.create_task(self.state.batches.runner.until_over())}, timeout=TELL_S)
            batch = await self._found(batch)
        return await asyncio.to_thread(self._end, batch, *await self._paths(batch))

    async def _begin(self) -> Batch:
        """Raises :class:`ApiError`, ``OSError``."""
        batches, file = self.state.batches, self.file
        if before := await batches.call(lambda store: store.batches("", None, 1)):
            (batch,) = before
            copy = await batches.call(lambda store: store.path(batch.input_file_id))
            same = await asyncio.to_thread(filecmp.cmp, copy, file, shallow=False)
            if same and batch.model == self.state.engine.model:
                self._say(f"going on with {batch.id}")
                return batch
            other = "model" if same else "file"
            raise ApiError("conflict", f"{self.folder} has a batch of another {other}; remove it to begin anew.")

        def copied(store: Store) -> str:
            path = store.new_path()
            shutil.copyfile(file, path)
            return store.take(path, "", file.name).id

        url = await asyncio.to_thread(first_url, file, self.state.settings.max_body_bytes)
        name = await batches.call(copied)
        return await batches.create(name, url, None, "", None, window_s=NO_WINDOW_S)

    @property
    def folder(self) -> Path:
        return Path(self.state.batches.settings.path)

    async def _found(self, batch: Batch) -> Batch:
        return await self.state.batches.call(lambda store: store.batch(batch.id, ""))

    async def _paths(self, batch: Batch) -> list[Path | None]:
        names = (batch.output_file_id, batch.error_file_id)
        return await self.state.batches.call(lambda store: [store.path(name) if name else None for name in names])

    def _tell(self, batch: Batch) -> None:
        paused = self.state.batches.runner.paused
        done = f"{batch.completed + batch.failed} of {batch.total} lines" if batch.total else f"reading {self.file}"
        self._say(paused or done)

    def _end(self, batch: Batch, output: Path | None, errors: Path | None) -> int:
        for problem in batch.errors:
            self._say(f"{self.file}:{problem.line or 0}: {problem.message}")
        if batch.status == "completed":
            _copy(output, self.output)
            if errors is not None:
                _copy(errors, self.output.with_name(self.output.name + ".errors"))
            self._say(f"{batch.completed} lines are answered in {self.output}, {batch.failed} failed")
        shutil.rmtree(self.folder)
        return OK if batch.status == "completed" else FAILED


def _copy(source: Path | None, target: Path) -> None:
    """Whole or not at all; no ``source``: an empty file."""
    part = target.with_name(target.name + ".part")
    shutil.copyfile(source or os.devnull, part)
    part.replace(target)


def run_batch(plan: EnginePlan, file: Path, output: Path, say: Callable[[str], None] = to_stderr) -> int:
    """Answer the requests of ``file``; returns the exit code. What is done lies in ``batches.path`` until all is."""
    server = make_server(plan, BatchRun, say=say)
    server.file, server.output = file, output
    code = asyncio.run(server.run())
    return INTERRUPTED if server.code is None and code == OK else code
