"""A model's tokenizer as ``GetTokenizer`` sends it: a zip archive of its files."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "*.jinja", "*.tiktoken", "tokenizer.model"),
)
"""What clients look for."""
PIECE = 64 * 1024
"""Bytes of the archive in one message."""


def archive(folder: str) -> tuple[bytes, str]:
    """The archive and its SHA-256, in hexadecimal digits. Raises ``FileNotFoundError`` where there is no
    ``tokenizer.json``."""
    if not (Path(folder) / "tokenizer.json").is_file():
        raise FileNotFoundError("the model has no tokenizer.json")
    found = sorted({file for pattern in PATTERNS for file in Path(folder).glob(pattern) if file.is_file()})
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as written:
        for file in found:
            written.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return data.getvalue(), hashlib.sha256(data.getvalue()).hexdigest()


def pieces(data: bytes, digest: str) -> Iterator[tuple[bytes, str]]:
    """The bytes of each message, the last one with the digest."""
    for begin in range(0, len(data), PIECE):
        end = begin + PIECE
        yield data[begin:end], digest if end >= len(data) else ""
