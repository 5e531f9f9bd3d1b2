"""``/v1/files``: files of requests, and those with their answers. https://platform.openai.com/docs/api-reference/files"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from engine.http.bodies import check_encoding, json_response
from engine.http.errors import HttpError
from engine.http.incoming import owner_of, state_of
from engine.http.paging import limit_of, page
from engine.service.batches.batches import Batches, disk_full
from engine.service.batches.records import File
from engine.service.batches.store import MOST_FILES, DiskFull, Store, writing
from engine.service.errors import bad_request

PART_S = 30.0
"""How long an upload may send nothing."""
BUFFER_BYTES = 1024 * 1024
MOST_FIELD_BYTES = 4096
MOST_LINES = 200
"""Of a form without its file: reading lines that are there holds up everything else."""


class Lines:
    """The content of a request, of which at most :data:`MOST_LINES` lines can be read."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._left = MOST_LINES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Raises ``ValueError`` for one line too many."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {MOST_LINES} lines beside its file")
        return await self._content.readline(max_line_length=max_line_length)


async def upload(http: web.Request) -> web.StreamResponse:
    """Multipart: ``purpose`` and ``file``, which goes to the disk as it comes."""
    if not http.content_type.startswith("multipart/form-data"):
        message = "Content-Type must be multipart/form-data, with the fields purpose and file."
        raise HttpError(415, message, code="unsupported_media_type")
    check_encoding(http)
    state, tenant = state_of(http), owner_of(http)
    if (origin := http.headers.get("Origin")) is not None and not {origin, "*"} & {*state.settings.cors_origins}:
        # A web page may send a form without asking this server first.
        raise HttpError(403, "Pages of this origin may not upload (server.cors_origins).", code="foreign_origin")
    batches = state.batches
    if not await batches.call(lambda store: store.has_room(tenant)):
        raise _too_many_files()
    path = await batches.call(lambda store: store.new_path())

    def taken(store: Store) -> File:
        # Others of this tenant may have come to their end meanwhile.
        if store.bytes_of(tenant) + path.stat().st_size > batches.settings.total_bytes:
            raise _too_many(batches)
        if not store.has_room(tenant):
            raise _too_many_files()
        return store.take(path, tenant, filename)

    try:
        filename, purpose = await _receive(http, batches, tenant, path)
        if purpose != "batch":
            raise bad_request(f"purpose is {purpose[:32]!r}; this server takes 'batch' alone.", "purpose")
        file = await batches.call(taken)
    except DiskFull:
        raise disk_full() from None
    finally:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    return json_response(file.public())


async def _receive(http: web.Request, batches: Batches, tenant: str, path: Path) -> tuple[str, str]:
    """Write the file; its name and purpose."""
    filename, fields = None, dict[str, str]()
    try:
        form = MultipartReader(http.headers, cast(StreamReader, Lines(http.content)))
        while (part := await _next(form)) is not None:
            if not isinstance(part, BodyPartReader):
                raise bad_request("A part of the form has parts itself.")
            if part.name == "file" and filename is None:
                filename = _words(part.filename or "file")[:255]
                await _write(part, batches, tenant, path)
            elif part.name == "purpose":
                fields["purpose"] = await _text(part)
            else:
                name = _words(part.name or "")[:64]
                raise bad_request(f"Unknown field {name!r}.", name, "unknown_parameter")
    except (ValueError, HttpProcessingError) as error:
        words = error.message if isinstance(error, HttpProcessingError) else str(error)
        raise bad_request(f"The form cannot be read: {_words(words).strip()[:200]}.") from None
    except TimeoutError:
        raise HttpError(408, f"Nothing came for {PART_S:.0f} s.", code="body_timeout") from None
    for name in ("file", "purpose"):
        if (filename if name == "file" else fields.get(name)) is None:
            raise bad_request(f"Missing required field {name!r}.", name, "missing_required_parameter")
    assert filename is not None
    return filename, fields["purpose"]


async def _write(part: BodyPartReader, batches: Batches, tenant: str, path: Path) -> None:
    settings, size = batches.settings, 0
    before = await batches.call(lambda store: store.bytes_of(tenant))

    def write(file: BinaryIO, data: bytes) -> None:
        with writing():
            file.write(data)
            file.flush()

    file = await asyncio.to_thread(open, path, "wb")
    try:
        while data := await _chunk(part, BUFFER_BYTES):
            size += len(data)
            batches.uploading[tenant] += len(data)
            if size > settings.max_file_bytes:
                message = f"The file has more than {settings.max_file_bytes} bytes (batches.max_file_bytes)."
                raise HttpError(413, message, code="file_too_large")
            if before + batches.uploading[tenant] > settings.total_bytes:
                raise _too_many(batches)
            await asyncio.to_thread(write, file, data)
        await asyncio.to_thread(_sync, file)
    finally:
        batches.uploading[tenant] -= size
        await asyncio.to_thread(file.close)


def _too_many(batches: Batches) -> HttpError:
    message = f"The files have more than {batches.settings.total_bytes} bytes (batches.total_bytes); delete some."
    return HttpError(413, message, code="files_too_large")


def _too_many_files() -> HttpError:
    message = f"There are {MOST_FILES} files, as many as may be; delete some."
    return HttpError(413, message, code="too_many_files")


def _words(text: str) -> str:
    """Of a header, whose bytes may be no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _sync(file: BinaryIO) -> None:
    with writing():
        os.fsync(file.fileno())


async def _next(form: MultipartReader) -> MultipartReader | BodyPartReader | None:
    async with asyncio.timeout(PART_S):
        return await form.next()


async def _chunk(part: BodyPartReader, size: int) -> bytes:
    async with asyncio.timeout(PART_S):
        return bytes(await part.read_chunk(size))


async def _text(part: BodyPartReader) -> str:
    text = b""
    while data := await _chunk(part, MOST_FIELD_BYTES):
        text += data
        if len(text) > MOST_FIELD_BYTES:
            raise bad_request(f"{part.name} is too long.", part.name)
    return text.decode(errors="replace")


async def listed(http: web.Request) -> web.StreamResponse:
    """``?purpose=``, ``?limit=``, ``?after=`` an id, ``?order=`` ``asc`` or ``desc``."""
    tenant, limit, order = owner_of(http), limit_of(http, most=10_000, default=10_000), http.query.get("order", "desc")
    purpose, after = http.query.get("purpose"), http.query.get("after")
    if order not in ("asc", "desc"):
        raise bad_request(f"order={order[:16]!r}: expected asc or desc.", "order")
    call = state_of(http).batches.call
    found = await call(lambda store: store.files(tenant, purpose, after, limit, order == "asc"))
    return json_response(page([file.public() for file in found], limit))


async def one(http: web.Request) -> web.StreamResponse:
    return json_response((await _found(http)).public())


async def delete(http: web.Request) -> web.StreamResponse:
    name, tenant = http.match_info["file"], owner_of(http)
    await state_of(http).batches.call(lambda store: store.forget(name, tenant))
    return json_response({"id": name, "object": "file", "deleted": True})


async def content(http: web.Request) -> web.StreamResponse:
    file = await _found(http)
    path = await state_of(http).batches.call(lambda store: store.path(file.id))
    return web.FileResponse(path, headers={"Content-Type": "application/jsonl"})


async def _found(http: web.Request) -> File:
    name, tenant = http.match_info["file"], owner_of(http)
    return await state_of(http).batches.call(lambda store: store.file(name, tenant))
