"""Headers of safetensors files, one or many, checked before a byte of their tensors is used.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header that gives
each tensor's dtype, shape and byte range, then the data without holes. Nothing in it can run code, which is why
pickled checkpoints are refused instead of read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.checkpoint.files import (
    CheckpointError,
    check_values,
    clipped,
    one_line,
    open_file,
    parse_json,
    read_file,
    read_json,
    shown,
)
from engine.checkpoint.limits import (
    MAX_HEADER_BYTES,
    MAX_HEADER_VALUES,
    MAX_INDEX_BYTES,
    MAX_NAME_CHARS,
    MAX_RANK,
    MAX_SHARDS,
    MAX_TENSORS,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""Of peft."""
GGUF = (
    "a model in GGUF, which is not read: set model.path to the model that it was made from, "
    "in safetensors and Hugging Face layout (a directory or a hub id)"
)
"""What to say of a path that has such files."""
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Of the dtypes that can be read, as headers name them."""
VALUES_PER_TENSOR, SPARE_VALUES = 16, 2**16
"""In a header. A tensor of eight dimensions: 15; the rest is for metadata."""
METADATA = "__metadata__"
_OFFSETS = b'"data_offsets"'
_EXPECTED = "expected dtype, shape and data_offsets, of whole numbers"


class TensorHeader(NamedTuple):
    """Where one tensor lies: ``num_bytes`` bytes from ``offset`` (from the start of the file)."""

    file: Path
    dtype: str
    """A key of :data:`ITEM_BYTES`."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Headers:
    """What a model directory has."""

    tensors: Mapping[str, TensorHeader]
    """By name."""
    lost: frozenset[str] = frozenset()
    """Tensors that an index names and that are in none of its files."""
    note: str = ""
    """Where the files that are read are not what an index says."""


class _Entry(msgspec.Struct, gc=False):
    """A tensor in a header. What has none of these is metadata, or a mistake."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, ...] | None = None


_HEADER = msgspec.json.Decoder(dict[str, _Entry])


def has_weights(folder: Path) -> bool:
    """Whether a model's folder has weights of any kind, if only pickled ones."""
    return any(os.path.lexists(folder / name) for name in (INDEX_NAME, SINGLE_NAME)) or bool(_pickled(folder))


def read_headers(path: str) -> Headers:
    """Every tensor of a model directory, from headers alone. Like transformers this takes one file before an index, and
    of an index the names of files: a tensor is where it is, whatever the index says.

    Raises :class:`CheckpointError` naming what is wrong: no safetensors, a damaged header, an index that points
    outside the directory or to files that are missing, tensors that are stored twice.
    """
    folder = Path(path)
    has_index = os.path.lexists(folder / INDEX_NAME)
    if os.path.lexists(folder / SINGLE_NAME):
        note = (
            f"{SINGLE_NAME} is read; {INDEX_NAME} beside it, and the files that it names, are not" if has_index else ""
        )
        return Headers(read_header(folder / SINGLE_NAME), note=note)
    if has_index:
        return _read_sharded(folder)
    pickled = _pickled(folder)
    if pickled:
        raise CheckpointError(
            f"model.path={path}: {', '.join(map(clipped, pickled[:3]))} is a pickled checkpoint; loading one can run "
            "any code it contains, so only safetensors are read. Convert it with save_pretrained(..., "
            "safe_serialization=True)"
        )
    why = other_weights(folder) or f"found neither {SINGLE_NAME} nor {INDEX_NAME}"
    raise CheckpointError(f"model.path={path}: {why}")


def other_weights(folder: Path) -> str:
    """What a folder has that is no model in safetensors, and what to do about it; empty for nothing known."""
    if os.path.lexists(folder / ADAPTER_CONFIG):
        base = _base_of(folder)
        return (
            f"a LoRA adapter{f' of {base}' if base else ''}, not a model: merge it into its model (merge_and_unload "
            "and save_pretrained of peft), and set model.path to that"
        )
    return GGUF if any(folder.glob("*.gguf")) else ""


def _base_of(folder: Path) -> str:
    """The model that an adapter says it is of."""
    try:
        return shown(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    except CheckpointError:
        return ""


def _pickled(folder: Path) -> list[str]:
    return sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))


def _read_sharded(folder: Path) -> Headers:
    index = folder / INDEX_NAME
    weight_map = _weight_map(index)
    file_names = sorted(set(weight_map.values()))
    if len(file_names) > MAX_SHARDS:
        raise CheckpointError(f"{index}: {len(file_names)} files, at most {MAX_SHARDS} are read (MAX_SHARDS)")
    entries: dict[str, TensorHeader] = {}
    duplicates: list[str] = []
    for file_name in file_names:
        _check_file_name(file_name, index)
        header = read_header(folder / file_name)
        duplicates += [name for name in header if name in entries]
        entries.update(header)
        if len(entries) > MAX_TENSORS:
            raise CheckpointError(f"{index}: more than {MAX_TENSORS} tensors in its files (MAX_TENSORS)")
    if duplicates:
        raise CheckpointError(f"{index}: stored in more than one file: {name_list(duplicates)}")
    lost = weight_map.keys() - entries.keys()
    elsewhere = {name for name in entries if weight_map.get(name) != entries[name].file.name}
    found = [f"{len(elsewhere)} tensors are not where it says ({name_list(elsewhere, 3)})"] if elsewhere else []
    found += [f"{len(lost)} that it names are in none of its files ({name_list(lost, 3)})"] if lost else []
    note = f"{index.name} is out of date: {', and '.join(found)}; each tensor is read from where it is" if found else ""
    return Headers(entries, frozenset(lost), note)


def _weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor."""
    data = read_file(index, MAX_INDEX_BYTES, "MAX_INDEX_BYTES")
    try:
        document = parse_json(data, MAX_TENSORS, "MAX_TENSORS")
    except CheckpointError as error:
        raise CheckpointError(f"{index}: {error}") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    return weight_map


def _check_file_name(name: str, index: Path) -> None:
    """A shard is a file beside its index: a downloaded index must not make us read anything else."""
    if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: {clipped(name)} is not the name of a .safetensors file in this directory")
    if len(name) > MAX_NAME_CHARS or not os.path.lexists(index.parent / name):
        raise CheckpointError(f"{index}: file {clipped(name)} is missing")


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file. Raises :class:`CheckpointError` unless the header is sound."""
    with open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise CheckpointError(f"{file}: header of {length} bytes in a file of {size} bytes")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: header of {length} bytes, at most {MAX_HEADER_BYTES} are read (MAX_HEADER_BYTES)"
            )
        data = stream.read(length)
    try:
        entries = {
            name: _parse_entry(file, name, entry, 8 + length)
            for name, entry in _entries(data).items()
            if name != METADATA
        }
        _check_ranges(entries, 8 + length, size)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return entries


def _entries(data: bytes) -> dict[str, _Entry]:
    tensors = data.count(_OFFSETS)
    check_values(data, MAX_HEADER_VALUES, "MAX_HEADER_VALUES")
    check_values(data, SPARE_VALUES + VALUES_PER_TENSOR * tensors, f"VALUES_PER_TENSOR for {tensors} tensors")
    try:
        found = _HEADER.decode(data)
    except (ValueError, RecursionError) as error:
        _explain(data)
        raise CheckpointError(f"header is not an object of tensors ({one_line(str(error))})") from error
    if tensors > len(found) or b"\\u" in data:
        parse_json(data, MAX_HEADER_VALUES)  # says what appears twice
    return found


def _explain(data: bytes) -> None:
    """Raise :class:`CheckpointError` naming the tensor whose entry is none, if it is one's."""
    header = parse_json(data, MAX_HEADER_VALUES)
    for name, value in header.items() if isinstance(header, dict) else ():
        try:
            msgspec.convert(value, _Entry)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"tensor {clipped(name)}: {_EXPECTED} ({error})") from error


def _parse_entry(file: Path, name: str, entry: _Entry, data_start: int) -> TensorHeader:
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    if not dtype or shape is None or offsets is None:
        raise CheckpointError(f"tensor {clipped(name)}: {_EXPECTED}")
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise CheckpointError(
            f"tensor {clipped(name)}: dtype {clipped(dtype)}, expected one of {', '.join(ITEM_BYTES)}"
        )
    if len(name) > MAX_NAME_CHARS:
        most = f"at most {MAX_NAME_CHARS} are read (MAX_NAME_CHARS)"
        raise CheckpointError(f"tensor {clipped(name)} has a name of {len(name)} characters, {most}")
    if len(shape) > MAX_RANK or min(shape, default=0) < 0:
        sizes = f"expected at most {MAX_RANK} sizes (MAX_RANK)"
        raise CheckpointError(f"tensor {clipped(name)}: shape {clipped(list(shape))}, {sizes}")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise CheckpointError(f"tensor {clipped(name)}: data_offsets {clipped(list(offsets))}, expected [begin, end]")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * item:
        raise CheckpointError(f"tensor {clipped(name)}: {num_bytes} bytes for shape {clipped(list(shape))} of {dtype}")
    return TensorHeader(file, dtype, shape, data_start + offsets[0], num_bytes)


def _check_ranges(entries: Mapping[str, TensorHeader], data_start: int, size: int) -> None:
    """Byte ranges follow one another without overlap or hole and end with the file."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            kind = "overlaps another" if entry.offset < end else "follows a hole"
            raise CheckpointError(f"tensor {clipped(name)} {kind} at byte {entry.offset}")
        end += entry.num_bytes
    if end != size:
        raise CheckpointError(f"tensors end at byte {end}, the file at {size}")


def name_list(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(shown, ordered[:limit])) + more
