"""Embedder ``static``: the mean of the vectors of a text's tokens (model2vec, github.com/MinishLab/model2vec).

A folder has ``model.safetensors`` with ``embeddings [vocab_size, dim]``, and in some ``weights [vocab_size]`` and
``mapping [vocab_size]``; ``tokenizer.json``; and ``config.json``. A mean knows no order of words: "Can cats eat dogs"
and "Can dogs eat cats" have one vector.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.files import open_file
from engine.checkpoint.headers import TensorHeader, read_header
from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine_plugins.embedder.ngrams import unit

FORMATS = {"F16": "e", "F32": "f", "F64": "d", "I64": "q", "I32": "i"}
"""Of numbers, as ``struct`` has them."""
MOST_TOKENS = 128
"""Of a text: what comes after them is not looked at."""


@dataclass(frozen=True)
class StaticConfig(SlotConfig):
    path: str = ""
    """The folder."""
    tensor: str = "embeddings"
    """The table in ``model.safetensors``: a model's ``model.embed_tokens.weight`` will do, though not as well."""


class StaticEmbedder:
    """Rows are read from the mapped file: of a large table only what is asked for is in memory. Raises ``ValueError``
    saying what the folder lacks."""

    def __init__(self, config: StaticConfig, context: BuildContext) -> None:
        if not config.path:
            raise ValueError("embedder.path is empty; name a folder in the layout of model2vec: embedder.path=DIR")
        from tokenizers import Tokenizer  # slow to import, for those who have other embedders

        folder, name = Path(config.path), config.tensor
        if not folder.is_dir():
            raise ValueError(f"embedder.path={config.path}: no such directory")
        file = folder / "model.safetensors"
        headers = read_header(file)
        if name not in headers or len(headers[name].shape) != 2:
            raise ValueError(f"{file}: expected a tensor {name!r} [vocab_size, dim]; it has {', '.join(headers)[:200]}")
        with open_file(file) as opened:
            self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._table = headers[name]
        self._rows, self.dim = self._table.shape
        self._is_bfloat16 = self._table.dtype == "BF16"
        self._row = struct.Struct(f"<{self.dim}{'f' if self._is_bfloat16 else _format(file, name, self._table)}")
        self._weights = self._column(file, headers, "weights")
        self._mapping = self._column(file, headers, "mapping")
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def embed(self, text: str) -> Sequence[float]:
        vectors = list[Sequence[float]]()
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids[:MOST_TOKENS]:
            row = int(self._mapping[token]) if token < len(self._mapping) else token
            if row >= self._rows:
                continue
            vector = self._read(row)
            if token < len(self._weights):
                weight = self._weights[token]
                vector = tuple([weight * value for value in vector])
            vectors.append(vector)
        return unit(list(map(sum, zip(*vectors, strict=True))) or [0.0] * self.dim)

    def _read(self, row: int) -> tuple[float, ...]:
        size = self._table.num_bytes // self._rows
        begin = self._table.offset + row * size
        stored = self._data[begin : begin + size]
        if self._is_bfloat16:  # the upper half of a float32
            wide = bytearray(2 * size)
            wide[2::4], wide[3::4] = stored[0::2], stored[1::2]
            stored = bytes(wide)
        return self._row.unpack(stored)

    def _column(self, file: Path, headers: dict[str, TensorHeader], name: str) -> tuple[float, ...]:
        """A number for each token; none where the file has no such tensor."""
        if name not in headers:
            return ()
        header = headers[name]
        count = header.shape[0] if header.shape else 0
        return struct.unpack_from(f"<{count}{_format(file, name, header)}", self._data, header.offset)


def _format(file: Path, name: str, header: TensorHeader) -> str:
    if header.dtype not in FORMATS:
        raise ValueError(f"{file}: {name} is {header.dtype}; supported: {', '.join(FORMATS)}")
    return FORMATS[header.dtype]
