"""Rounded weights on disk: read back as they were, and never trusted."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.parts import StoredPart, joined_origins, origin_of_tensor
from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.provider import BuildContext
from engine.kernels import disk_cache, kept_weights
from engine.kernels.disk_cache import DiskCache, Kept
from engine.kernels.linear import PackedLinear
from engine.kernels.packer import Packer
from engine.kernels.packing import Target
from engine.kernels.quantized import paired, unpaired
from engine.native.folder import user_folder
from engine.testing.context import build_context
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config
from engine_plugins.quantizer.on_load import FP8, Int4, Int8, OnLoad

SIZES = (48, 160)
READ, WRITTEN = "read as kept on disk", "rounded now and kept on disk"


@pytest.fixture(autouse=True)
def small_layers_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_weights, "SMALLEST", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Model:
    """A checkpoint of one gate and up projection with biases, and how often its tensors were read."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.reads = folder, 0
        folder.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        out, inputs = SIZES
        self.spec = LinearSpec((LinearPart("gate", out, True), LinearPart("up", out, True)), inputs, kind="gate_up")
        tensors = {}
        for part in self.spec.parts:
            tensors[f"{part.name}.weight"] = torch.randn(out, inputs, generator=generator)
            tensors[f"{part.name}.bias"] = torch.randn(out, generator=generator)
        save_file(tensors, folder / "model.safetensors")

    @property
    def file(self) -> Path:
        return self.folder / "model.safetensors"

    def parts(self, rank: str = "") -> list[StoredPart]:
        """As the loader hands them over; ``rank`` is the cut."""
        checkpoint = open_checkpoint(str(self.folder))

        def read(name: str) -> Tensor:
            self.reads += 1
            return checkpoint.read(name)

        def part(name: str) -> StoredPart:
            names = {suffix: f"{name}.{suffix}" for suffix in ("weight", "bias")}
            origins = [origin_of_tensor(full, checkpoint.entry(full), rank) for full in names.values()]
            return StoredPart({s: partial(read, full) for s, full in names.items()}, joined_origins(origins))

        return [part(one.name) for one in self.spec.parts]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


Make = Callable[..., Packer]


def int4(cache: Path | str, execution: str = "compile", group_size: int = 32, **config: Any) -> Packer:
    return packer(Int4(Int4Config(group_size=group_size, cache=str(cache), **config), context()), execution)


def int8(cache: Path | str, execution: str = "compile", dtype: torch.dtype = torch.float32, **config: Any) -> Packer:
    return packer(Int8(Int8Config(cache=str(cache), **config), context()), execution, dtype)


def fp8(cache: Path | str, execution: str = "compile", **config: Any) -> Packer:
    return packer(FP8(FP8Config(cache=str(cache), **config), context()), execution)


def packer(quantizer: OnLoad, execution: str, dtype: torch.dtype = torch.float32) -> Packer:
    return Packer(quantizer, Target("cpu", dtype, execution == "compile"))


def context() -> BuildContext:
    made = build_context()
    return replace(made, model=replace(made.model, path="/a/model", name="../a model"))


def pack(made: Packer, model: Model, rank: str = "") -> PackedLinear:
    return made(model.spec, model.parts(rank))


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def same(one: PackedLinear, other: PackedLinear) -> bool:
    x = torch.randn(5, SIZES[1], generator=torch.Generator().manual_seed(9))
    equal = all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return equal and torch.equal(one.apply(x), other.apply(x)) and torch.equal(one.reference(x), other.reference(x))


@pytest.mark.parametrize("execution", ["compile", "eager"])
@pytest.mark.parametrize("make", [int4, int8, fp8])
def test_the_second_start_reads_what_the_first_made_and_nothing_of_the_checkpoint(
    make: Make, execution: str, model: Model, tmp_path: Path
) -> None:
    first = pack(make(tmp_path / "cache", execution), model)
    read = model.reads
    second = pack(make(tmp_path / "cache", execution), model)
    assert read == 4 and model.reads == 4
    assert first.label.endswith(WRITTEN) and second.label.endswith(READ)
    assert same(first, second) and same(first, pack(make("none", execution), model))


@pytest.mark.parametrize("make", [int4, int8, fp8])
def test_kept_files_are_safetensors_that_only_the_user_can_write_to(make: Make, model: Model, tmp_path: Path) -> None:
    packed = pack(make(tmp_path / "cache"), model)
    (file,) = files(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    with safe_open(file, "pt") as opened:
        assert all(torch.equal(opened.get_tensor(name), tensor) for name, tensor in packed.tensors.items())


def test_activations_and_the_compute_dtype_share_what_is_kept(model: Model, tmp_path: Path) -> None:
    pack(int8(tmp_path / "cache"), model)
    other = pack(int8(tmp_path / "cache", dtype=torch.bfloat16, activations="int8"), model)
    assert other.label.endswith(READ) and "int8 activations" in other.label


def test_a_changed_checkpoint_is_rounded_again_in_place_of_the_old(model: Model, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old = pack(int4(cache), model)
    changed = Model(model.folder, seed=1)
    os.utime(changed.file, ns=(1, 1))
    new = pack(int4(cache), changed)
    assert new.label.endswith(WRITTEN) and not same(old, new) and len(files(cache)) == 1
    assert same(new, pack(int4(cache), changed))


def test_other_settings_ranks_and_code_have_files_of_their_own(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    pack(int4(cache), model, "out 0/2")
    assert pack(int4(cache), model, "out 1/2").label.endswith(WRITTEN)
    assert pack(int4(cache, group_size=64), model, "out 0/2").label.endswith(WRITTEN)
    assert pack(int8(cache), model, "out 0/2").label.endswith(WRITTEN)
    assert pack(int4(cache, "eager"), model, "out 0/2").label.endswith(WRITTEN)
    monkeypatch.setattr(kept_weights, "_code", lambda: "another version")
    assert pack(int4(cache), model, "out 0/2").label.endswith(WRITTEN)
    assert len(files(cache)) == 6


def test_a_checkpoint_that_was_replaced_by_one_of_the_same_size_and_time_is_rounded_again(
    model: Model, tmp_path: Path
) -> None:
    os.utime(model.file, ns=(0, 0))
    old = pack(int4(tmp_path / "cache"), model)
    replacement = Model(tmp_path / "other", seed=1).file
    os.utime(replacement, ns=(0, 0))
    assert replacement.stat().st_size == model.file.stat().st_size
    os.replace(replacement, model.file)
    new = pack(int4(tmp_path / "cache"), model)
    assert new.label.endswith(WRITTEN) and not same(old, new)


def damage_data(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_suffix(".elsewhere")))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def writable_for_the_group(file: Path) -> None:
    file.chmod(0o620)


def another_name(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"scale"', b'"spale"', 1))


def another_dtype(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))


def another_shape(file: Path) -> None:
    data = file.read_bytes()
    shape = re.search(rb'"shape": \[(\d+), (\d+)', data)
    assert shape is not None and shape[1] != shape[2]
    swapped = b'"shape": [' + shape[2] + b", " + shape[1]
    file.write_bytes(data[: shape.start()] + swapped + data[shape.end() :])


def not_json(file: Path) -> None:
    file.write_bytes(b"\x02" + bytes(7) + b"{[" + bytes(50))


def foreign(file: Path) -> None:
    save_file({"weight": torch.zeros(3)}, file)


SPOILED = (
    damage_data, shorten, empty, zero, link, pipe, writable_for_the_group, another_name, another_dtype, another_shape,
    not_json, foreign,
)  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_damaged_or_foreign_file_is_made_again(spoil: Callable[[Path], None], model: Model, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    right = pack(int4(cache), model)
    (file,) = files(cache)
    spoil(file)
    with pytest.warns(UserWarning, match="made again"):
        again = pack(int4(cache), model)
    assert again.label.endswith(WRITTEN) and same(right, again)
    assert pack(int4(cache), model).label.endswith(READ)


def test_a_file_of_another_layer_is_not_taken(model: Model, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pack(int4(cache), model, "out 0/2")
    pack(int4(cache), model, "out 1/2")
    one, other = files(cache)
    shutil.copy(one, other)
    labels = {pack(int4(cache), model, f"out {rank}/2").label.rpartition(", ")[2] for rank in (0, 1)}
    assert labels == {READ, WRITTEN}


def test_a_models_folder_that_others_may_write_to_is_neither_read_nor_written(model: Model, tmp_path: Path) -> None:
    pack(int4(tmp_path / "cache"), model)
    (folder,) = (tmp_path / "cache").iterdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match=f"rounded anew at every start: {folder}"):
        packed = pack(int4(tmp_path / "cache"), model)
    assert "disk" not in packed.label


def test_a_file_is_the_users_alone_whatever_the_umask_is(model: Model, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        pack(int4(tmp_path / "cache"), model)
    finally:
        os.umask(before)
    made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o600]


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(model: Model, tmp_path: Path) -> None:
    pack(int4(tmp_path / "cache"), model)
    (file,) = files(tmp_path / "cache")
    left = file.parent / "engine-scratch-abcdefgh"
    left.mkdir()
    for name in ("lock", "new"):
        (left / name).touch()
    assert pack(int4(tmp_path / "cache"), model).label.endswith(READ)
    assert [*file.parent.iterdir()] == [file]


def test_a_folder_that_cannot_be_looked_into_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_cache, "open_own", forbidden)
    cache = DiskCache(tmp_path / "cache", f"model-{'0' * 16}", 10**6)
    with pytest.warns(UserWarning, match="cannot be used and are made again.*Permission denied"):
        assert cache.read("layer", "key") is None


@pytest.mark.parametrize("why", ["others may write", "others may rename it", "a file", "below a file"])
def test_a_folder_that_cannot_be_used_is_a_warning_that_names_it(why: str, model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    if why == "others may write":
        folder.mkdir()
        folder.chmod(0o777)
    elif why == "others may rename it":
        tmp_path.chmod(0o757)
    else:
        folder.write_text("in the way")
        folder = folder / "inner" if why == "below a file" else folder
    with pytest.warns(UserWarning, match=f"rounded anew at every start: {folder}"):
        packed = pack(int4(folder), model)
    assert same(packed, pack(int4("none"), model)) and "disk" not in packed.label


def test_a_full_disk_is_a_warning_and_leaves_nothing_half_written(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        packed = pack(int4(tmp_path / "cache"), model)
    assert same(packed, pack(int4("none"), model)) and files(tmp_path / "cache") == []


def test_a_disk_that_is_nearly_full_is_left_alone(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=disk_cache.SPARE))
    with pytest.warns(UserWarning, match="less than 1 GiB would be left free"):
        pack(int4(tmp_path / "cache"), model)
    assert files(tmp_path / "cache") == []


def kept(num_bytes: int) -> Kept:
    return Kept({"weight": torch.zeros(num_bytes, dtype=torch.uint8)}, {})


def test_the_longest_unused_models_make_room_and_nothing_else_is_removed(tmp_path: Path) -> None:
    names = [f"model-{'0' * 15}{i}" for i in range(3)]
    for age, name in enumerate(names[:2]):
        assert DiskCache(tmp_path, name, 10**6).write("layer", "key", kept(1000))
        os.utime(tmp_path / name, (2e9 - age, 2e9 - age))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "only-copy.safetensors").write_bytes(b"years of work")
    assert DiskCache(tmp_path, names[2], 3000).write("layer", "key", kept(1000))
    assert {path.name for path in tmp_path.iterdir()} == {names[0], names[2], "thesis"}
    assert (tmp_path / "thesis" / "only-copy.safetensors").is_file()


def test_what_was_not_used_for_a_month_is_removed_with_the_next_write(tmp_path: Path) -> None:
    old, new = (DiskCache(tmp_path, f"model-{'0' * 15}{i}", 10**6) for i in range(2))
    old.write("layer", "key", kept(10))
    os.utime(tmp_path / f"model-{'0' * 16}", (0, 0))
    new.write("layer", "key", kept(10))
    assert [path.name for path in tmp_path.iterdir()] == [f"model-{'0' * 15}1"]
    assert old.read("layer", "key") is None and old.write("layer", "key", kept(10))


def test_a_model_larger_than_the_bound_is_told_which_setting_to_raise(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, f"model-{'0' * 16}", 1500)
    assert cache.write("first", "key", kept(1000))
    with pytest.warns(UserWarning, match="quantizer.cache_gib=.* is less than this model's weights take"):
        assert not cache.write("second", "key", kept(1000))
    assert len(files(tmp_path)) == 1


def test_a_layer_that_does_not_fit_removes_no_other_model(tmp_path: Path) -> None:
    other = DiskCache(tmp_path, f"other-{'0' * 16}", 10**6)
    assert other.write("layer", "key", kept(10))
    with pytest.warns(UserWarning, match="quantizer.cache_gib"):
        assert not DiskCache(tmp_path, f"model-{'0' * 16}", 1500).write("layer", "key", kept(2000))
    assert other.read("layer", "key") is not None


def test_a_replaced_file_is_not_counted_beside_the_new_one(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, f"model-{'0' * 16}", 1500)
    assert cache.write("layer", "old", kept(1000)) and cache.write("layer", "new", kept(1000))


def test_tests_leave_nothing_in_the_users_folder_of_weights_and_share_the_one_of_kernels() -> None:
    assert user_folder("weights").resolve().is_relative_to(Path(tempfile.gettempdir()).resolve())
    assert user_folder("native").is_symlink()


def test_processes_that_start_at_once_replace_each_others_files_whole(tmp_path: Path) -> None:
    one, other = (DiskCache(tmp_path, f"model-{'0' * 16}", 10**6) for _ in range(2))
    for cache in (one, other, one):
        assert cache.write("layer", "key", kept(100))
        found = other.read("layer", "key")
        assert found is not None and found.tensors["weight"].shape == (100,)
    assert len(files(tmp_path)) == 1


def test_tensors_that_come_from_no_file_are_not_kept(model: Model, tmp_path: Path) -> None:
    parts = [dict(part) for part in model.parts()]
    packed = int4(tmp_path / "cache")(model.spec, parts)
    assert "disk" not in packed.label and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("inputs", [8, 7])
def test_4_bit_codes_in_pairs_come_back(inputs: int) -> None:
    codes = torch.randint(-8, 8, (5, inputs), dtype=torch.int8)
    assert paired(codes).shape == (5, -(-inputs // 2)) and torch.equal(unpaired(paired(codes), inputs), codes)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"cache": "weights"}, "quantizer.cache=weights"),
        ({"cache_gib": 0}, "quantizer.cache_gib=0"),
        ({"cache_gib": float("inf")}, "quantizer.cache_gib=inf"),
        ({"cache_gib": float("nan")}, "quantizer.cache_gib=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Int4Config(**wrong)
