"""Files of requests, line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.service.batches.lines import MOST_PROBLEMS, Answered, Validation, body_of, first_url, output_line

URL = "/v1/chat/completions"


def written(**changes: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {}} | changes).encode()


def validated(folder: Path, data: bytes, most_lines: int = 10, most_bytes: int = 200) -> Validation:
    (folder / "in").write_bytes(data)
    validation = Validation(folder / "in", URL, most_lines, most_bytes)
    while not validation.is_done:
        validation.read(2)
    return validation


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", (None, "empty_file", None)),
        (b"\n \n", (2, "empty_file", None)),
        (b"[1]", (1, "invalid_request", None)),
        (b"{", (1, "invalid_json_line", None)),
        (b"\xff\xfe", (1, "invalid_json_line", None)),
        (b"[" * 100_000, (1, "line_too_long", None)),
        (written() + b"\n" + b'{"custom_id": "b"}', (2, "invalid_request", None)),
        (written(custom_id=7), (1, "invalid_request", None)),
        (written(custom_id=""), (1, "invalid_custom_id", "custom_id")),
        (written(method="GET"), (1, "invalid_method", "method")),
        (written(url="/v1/completions"), (1, "mismatched_endpoint", "url")),
        (written(body=[]), (1, "invalid_body", "body")),
        (written() + b"\r\n\n" + written(), (3, "duplicate_custom_id", "custom_id")),
        (b"\n".join(written(custom_id=str(n)) for n in range(11)), (11, "too_many_lines", None)),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, data: bytes, problem: Any) -> None:
    (found,) = validated(tmp_path, data).problems
    assert (found.line, found.code, found.param) == problem and found.message.endswith(".")


def test_as_many_problems_are_said_as_anybody_reads(tmp_path: Path) -> None:
    assert len(validated(tmp_path, b"x\n" * 1000, 5000).problems) == MOST_PROBLEMS


def test_lines_are_found_again_where_they_lie(tmp_path: Path) -> None:
    data = written(custom_id="ä", body={"é": 1}) + b"\n\n" + written(custom_id="b", body={"n": 2}) + b"\r\n"
    (tmp_path / "in").write_bytes(data)
    lines = Validation(tmp_path / "in", URL, 10, 200).read(10)
    assert [(line.number, line.custom_id) for line in lines] == [(1, "ä"), (3, "b")]
    bodies = [json.loads(body_of(data[line.start : line.start + line.size])) for line in lines]
    assert bodies == [{"é": 1}, {"n": 2}] and first_url(tmp_path / "in", 200) == URL
    found = json.loads(output_line("batch_7", lines[1], Answered(200, "r", b'{"x": [1]}')))
    assert found == {
        "id": "batch_req_7000003",
        "custom_id": "b",
        "response": {"status_code": 200, "request_id": "r", "body": {"x": [1]}},
        "error": None,
    }


@pytest.mark.parametrize("data", [b"", b"\n", b"x", b"{}", b'{"url": 1}'])
def test_a_file_may_begin_with_no_request(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").write_bytes(data)
    assert first_url(tmp_path / "in", 200) == ""
