"""Uploads, as the official client and others send them."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.http.routes import files
from engine.service.batches.store import DiskFull

from ...service.fakes import in_loop
from ..test_responses_format import api
from .test_batches import with_batches

FILE = 'form-data; name="file"; filename="a.jsonl"'
PURPOSE = 'form-data; name="purpose"'


def form(*parts: tuple[str, bytes]) -> bytes:
    found = [b"--x\r\nContent-Disposition: " + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts]
    return b"".join(found) + b"--x--\r\n"


MULTIPART = "Content-Type: multipart/form-data; boundary=x"
COMPRESSED = f"{MULTIPART}\r\nContent-Encoding: gzip"
FILE_BYTES = f"Content-Disposition: {FILE}\r\n".encode()


@in_loop
async def test_a_file_is_listed_read_and_deleted(tmp_path: Path) -> None:
    async with with_batches(tmp_path) as server, api(server) as client:
        data = "".join(f'{{"n": {n}}}\n' for n in range(100_000)).encode()
        names = [(await client.files.create(file=(f"{n}.jsonl", data), purpose="batch")).id for n in range(3)]
        file = await client.files.retrieve(names[0])
        assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "0.jsonl", "batch", "processed")
        assert (await client.files.content(names[0])).content == data
        page = await client.files.list(limit=2)
        assert [each.id for each in page.data] == names[:0:-1] and page.has_more
        assert [each.id async for each in client.files.list(limit=2, order="asc")] == names
        assert (await client.files.list(purpose="batch_output")).data == []
        assert (await client.files.delete(names[0])).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(names[0])
        assert sorted(each.name for each in (tmp_path / "files").iterdir()) == sorted(names[1:])


@pytest.mark.parametrize(
    ("body", "head", "status", "code"),
    [
        (form((PURPOSE, b"batch"), (FILE, b"x" * 2001)), MULTIPART, 413, "file_too_large"),
        (form((PURPOSE, b"fine-tune"), (FILE, b"x")), MULTIPART, 400, None),
        (form((FILE, b"x")), MULTIPART, 400, "missing_required_parameter"),
        (form((PURPOSE, b"batch")), MULTIPART, 400, "missing_required_parameter"),
        (form((PURPOSE, b"batch" * 1000), (FILE, b"x")), MULTIPART, 400, None),
        (form((PURPOSE, b"batch"), (FILE, b"x"), (FILE, b"y")), MULTIPART, 400, "unknown_parameter"),
        (form((PURPOSE, b"batch"), ('form-data; name="other"', b"x")), MULTIPART, 400, "unknown_parameter"),
        (form((PURPOSE, b"batch"), (FILE, b"x" * 99))[:-20], MULTIPART, 400, None),
        (b"--x\r\n" + FILE_BYTES + b"bad header\r\n\r\nx\r\n--x--\r\n", MULTIPART, 400, None),
        (b"--x\r\n" + FILE_BYTES + b"X: " + b"y" * 20_000 + b"\r\n\r\nx\r\n--x--\r\n", MULTIPART, 400, None),
        (b"--x\r\n" + FILE_BYTES + b"X: y\r\n" * 500 + b"\r\nx\r\n--x--\r\n", MULTIPART, 400, None),
        (
            b'--x\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--x--\r\n',
            MULTIPART,
            400,
            "unknown_parameter",
        ),
        (gzip.compress(form((PURPOSE, b"batch"), (FILE, b"x"))), COMPRESSED, 415, "unsupported_encoding"),
        (form(*[(PURPOSE, b"batch")] * 100, (FILE, b"x")), MULTIPART, 400, None),
        (b"\r\n" * 300 + form((PURPOSE, b"batch"), (FILE, b"x")), MULTIPART, 400, None),
        (b"no form at all", MULTIPART, 400, None),
        (b"", "Content-Type: multipart/form-data", 400, None),
        (b"{}", "Content-Type: application/json", 415, "unsupported_media_type"),
    ],
)
@in_loop
async def test_a_form_that_makes_no_sense_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, head: str, status: int, code: str | None
) -> None:
    async with with_batches(tmp_path, batches={"max_file_bytes": 2000}) as server:
        found, _, data = await server.post("/v1/files", body, head)
        assert (found, json.loads(data)["error"]["code"]) == (status, code)
        assert [*tmp_path.glob("files/*")] == [] and not server.server.state.batches.uploading.total()


@in_loop
async def test_pages_of_foreign_origins_upload_nothing(tmp_path: Path) -> None:
    body = form((PURPOSE, b"batch"), (FILE, b"x"))
    async with with_batches(tmp_path, cors_origins=["https://chat.example.org"]) as server:
        assert (await server.post("/v1/files", body, MULTIPART, "Origin: https://evil.example.org"))[0] == 403
        assert (await server.post("/v1/files", body, MULTIPART, "Origin: https://chat.example.org"))[0] == 200


@in_loop
async def test_a_tenant_has_so_many_bytes(tmp_path: Path) -> None:
    async with with_batches(tmp_path, batches={"total_bytes": 2500}) as server, api(server) as client:
        first = await client.files.create(file=b"x" * 2000, purpose="batch")
        with pytest.raises(openai.APIStatusError) as error:
            await client.files.create(file=b"x" * 600, purpose="batch")
        assert error.value.code == "files_too_large"
        await client.files.delete(first.id)
        await client.files.create(file=b"x" * 600, purpose="batch")


@in_loop
async def test_a_full_disk_refuses_uploads_and_a_client_that_goes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_batches(tmp_path) as server, api(server) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        body = form((PURPOSE, b"batch"), (FILE, b"x" * 3_000_000))
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n{MULTIPART}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:2_000_000])
        await writer.drain()
        while not server.server.state.batches.uploading.total():
            await asyncio.sleep(0.01)
        writer.close()
        while [*tmp_path.glob("files/*")]:
            await asyncio.sleep(0.01)

        def full(file: Any) -> None:
            raise DiskFull(errno.errorcode[errno.ENOSPC])

        monkeypatch.setattr(files, "_sync", full)
        with pytest.raises(openai.InternalServerError) as error:
            await client.files.create(file=b"x", purpose="batch")
        assert (error.value.status_code, error.value.code) == (503, "disk_full")
        assert [*tmp_path.glob("files/*")] == []


@in_loop
async def test_a_name_that_is_no_utf_8_is_taken_as_far_as_it_is(tmp_path: Path) -> None:
    async with with_batches(tmp_path) as server:
        head = FILE_BYTES.replace(b"a.jsonl", b"../\xffa\xed\xa0\x80")
        status, _, data = await server.post(
            "/v1/files", b"--x\r\n" + head + b"\r\nx\r\n" + form((PURPOSE, b"batch")), MULTIPART
        )
        file = json.loads(data)
        assert (status, file["filename"]) == (200, "../\ufffda\ufffd\ufffd\ufffd")
        assert [each.name for each in tmp_path.glob("files/*")] == [file["id"]]


@in_loop
async def test_uploads_that_begin_together_do_not_exceed_what_a_tenant_has(tmp_path: Path) -> None:
    body = form((FILE, b"x" * 1000), (PURPOSE, b"batch"))
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n{MULTIPART}\r\nContent-Length: {len(body)}\r\n"
    begun = f"{head}Connection: close\r\n\r\n".encode() + body[:-900]
    async with with_batches(tmp_path, batches={"total_bytes": 2500}) as server:
        clients = [await asyncio.open_connection("127.0.0.1", server.server.port) for _ in range(5)]
        for _, writer in clients:
            writer.write(begun)
        while len([*tmp_path.glob("files/*")]) < 5:
            await asyncio.sleep(0.01)
        statuses = []
        for reader, writer in clients:
            writer.write(body[-900:])
            statuses.append(int((await reader.read()).split()[1]))
            writer.close()
        assert sorted(statuses) == [200, 200, 413, 413, 413]
        assert len([*tmp_path.glob("files/*")]) == 2 and not server.server.state.batches.uploading.total()


@in_loop
async def test_an_upload_that_stops_between_two_parts_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PART_S", 0.1)
    body = form((PURPOSE, b"batch"), (FILE, b"x"))
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n{MULTIPART}\r\nContent-Length: {len(body)}\r\n"
    async with with_batches(tmp_path) as server:
        for part in (b"--x\r\n", body[: body.index(b"filename")]):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
            writer.write(f"{head}\r\n".encode() + part)
            assert b" 408 " in await reader.readline()
            writer.close()
