"""Damaged, hostile and foreign checkpoints are refused by name before a weight is used."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import tensors
from engine.checkpoint.tensors import CheckpointError, open_checkpoint


def write(file: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


TWICE = b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_every_dtype_and_shape_comes_back_as_saved(tmp_path: Path) -> None:
    saved = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 2).half(),
        "d": torch.arange(6).view(1, 6),
        "e": torch.tensor([1, -2], dtype=torch.int8),
    }
    save_file(saved, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.names == set(saved)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in saved.items())


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    first, second = torch.randn(4), torch.randn(3)
    save_file({"a": first}, tmp_path / "x-1.safetensors")
    save_file({"b": second}, tmp_path / "x-2.safetensors")
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    checkpoint = open_checkpoint(str(tmp_path))
    assert torch.equal(checkpoint.read("a"), first) and torch.equal(checkpoint.read("b"), second)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(dtype="F31")}, b"8bytes..", "dtype 'F31'"),
        ({"a": entry(shape=(-1,))}, b"8bytes..", "shape"),
        ({"a": entry(shape=(2.0,))}, b"8bytes..", "shape"),
        ({"a": entry(shape=(3,))}, b"8bytes..", "8 bytes for shape"),
        ({"a": entry(offsets=(8, 0))}, b"8bytes..", "data_offsets"),
        ({"a": entry(offsets=(0, 8, 9))}, b"8bytes..", "data_offsets"),
        ({"a": entry()}, b"four", "the file at"),
        ({"a": entry()}, b"twelve bytes", "the file at"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"twelve bytes", "overlaps"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, b"x" * 20, "hole"),
        ({"a": {"dtype": "F32"}}, b"", "expected dtype, shape"),
        ([], b"", "not an object"),
        (b"{", b"", "not valid JSON"),
        (TWICE, b"8bytes..", "'a' appears twice"),
        (TWICE.replace(b'"a"', b'"\\u0061"', 1), b"8bytes..", "'a' appears twice"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(CheckpointError, match="header of 1099511627776 bytes"):
        open_checkpoint(str(tmp_path))


def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="too short"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.bin"])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path.parent / "x.safetensors")
    write_index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="is not the name of a"):
        open_checkpoint(str(tmp_path))


def test_tensors_are_read_from_where_they_are_whatever_an_index_says(tmp_path: Path) -> None:
    """Of its files, each tensor found once; what it names and none of them has is told apart."""
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"c": torch.ones(3)}, tmp_path / "y.safetensors")
    write_index(tmp_path, {"a": "y.safetensors", "b": "x.safetensors", "d": "x.safetensors"})
    found = open_checkpoint(str(tmp_path))
    assert [found.read(name).tolist() for name in "abc"] == [[1.0], [1.0] * 2, [1.0] * 3]
    assert (found.names, found.lost) == (set("abc"), {"d"})
    assert found.note == (
        "model.safetensors.index.json is out of date: 2 tensors are not where it says (a, c), and 1 that it names are "
        "in none of its files (d); each tensor is read from where it is"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_numbers_that_are_none_are_named_with_tensor_and_file(dtype: torch.dtype, tmp_path: Path) -> None:
    fine, broken = torch.ones(3, 2).to(dtype), torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    save_file({"a": fine, "b": broken, "c": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    tensors.check_finite(checkpoint, ["a", "c"])
    said = r"model\.safetensors: tensor 'b' holds NaN or infinity \(1 of 3 numbers\)"
    with pytest.raises(CheckpointError, match=said):
        tensors.check_finite(checkpoint, "abc")


@pytest.mark.parametrize(
    ("name", "words"), [("adapter_config.json", "a LoRA adapter, not"), ("a.gguf", "a model in GGUF")]
)
def test_a_model_without_weights_says_what_is_there_instead(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"model.path={tmp_path}: {words}"):
        open_checkpoint(str(tmp_path))


def test_one_file_is_read_where_there_is_an_index_too(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "missing.safetensors"})
    found = open_checkpoint(str(tmp_path))
    assert found.read("a").tolist() == [1.0]
    assert found.note.startswith("model.safetensors is read; model.safetensors.index.json beside it")


def test_an_index_is_checked_against_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"'y\.safetensors' is missing"):
        open_checkpoint(str(tmp_path))
    save_file({"a": torch.ones(1)}, tmp_path / "y.safetensors")
    write_index(tmp_path, {"a": "x.safetensors", "c": "y.safetensors"})
    with pytest.raises(CheckpointError, match="more than one file: a"):
        open_checkpoint(str(tmp_path))
    write_index(tmp_path, ["a"])
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(str(tmp_path))


def test_pickled_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="can run any code"):
        open_checkpoint(str(tmp_path))


def test_an_empty_directory_names_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(str(tmp_path))


def test_a_file_cut_short_after_opening_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ended inside tensor 'a'"):
        checkpoint.read("a")


CUTS: dict[str, tuple[tuple[int, tuple[tuple[int, int], ...]], ...]] = {
    "the first axis": ((0, ((2, 5),)),),
    "the last axis": ((2, ((1, 3),)),),
    "several ranges of one": ((1, ((0, 2), (3, 6))),),
    "several axes": ((0, ((1, 2), (4, 6))), (2, ((0, 1), (2, 4)))),
    "all of them": ((0, ((5, 6),)), (1, ((1, 2),)), (2, ((3, 4),))),
    "everything": ((0, ((0, 6),)), (2, ((0, 4),))),
    "nothing": ((1, ((3, 3),)),),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_read_and_nothing_else_of_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torch.arange(6 * 7 * 4).view(6, 7, 4).to(torch.int16)
    save_file({"before": torch.zeros(3), "a": saved, "after": torch.zeros(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    want, read = saved, 0
    for axis, ranges in CUTS[name]:
        want = torch.cat([want.narrow(axis, start, stop - start) for start, stop in ranges], dim=axis)

    class Counting(io.BufferedReader):
        def readinto(self, into: Any) -> int:
            nonlocal read
            read += len(into)
            return super().readinto(into)

    monkeypatch.setattr(tensors, "open_file", lambda file: Counting(io.FileIO(file)))
    found = checkpoint.read("a", CUTS[name])
    assert torch.equal(found, want) and found.is_contiguous()
    assert read == want.nbytes


def test_of_a_single_number_nothing_is_cut(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path)).read("a", ((0, ((4, 8),)),)) == 3.0


def test_a_file_cut_short_inside_of_a_share_is_noticed_by_who_reads_it(tmp_path: Path) -> None:
    """The other ranks' shares are still whole."""
    save_file({"a": torch.arange(100.0).view(10, 10)}, tmp_path / "model.safetensors")
    checkpoint, file = open_checkpoint(str(tmp_path)), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert torch.equal(checkpoint.read("a", ((0, ((0, 9),)),)), torch.arange(90.0).view(9, 10))
    assert checkpoint.read("a", ((1, ((0, 9),)),)).shape == (10, 9)
    for cut in ((0, ((9, 10),)), (1, ((9, 10),))):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: ended inside tensor 'a'"):
            checkpoint.read("a", (cut,))


@pytest.mark.parametrize("cut", [(0, ((8, 11),)), (2, ((0, 1),)), (1, ((3, 2),))])
def test_a_cut_that_a_tensor_does_not_have_is_no_part_of_another_tensor(cut: Any, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 10), "b": torch.zeros(10, 10)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a' has shape \[10, 10\], and .* of axis . are to be read"):
        open_checkpoint(str(tmp_path)).read("a", (cut,))
