"""What two engines must have in common to share keys and values."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.startup.build import build_engine
from engine.startup.content_digest import content_digest, file_states
from engine.startup.namespace import identity_of, lasting_namespace, passing_namespace
from engine.startup.rank import Rank

COMMON = ["device=cpu", "attention_kernel=torch"]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundled model, and an empty cache of digests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundled = Path(assemble(["model.path=bundled", *COMMON]).model.path)
    shutil.copytree(bundled, tmp_path / "model")
    return tmp_path / "model"


def plan_of(checkpoint: Path, *overrides: str) -> EnginePlan:
    return assemble([f"model.path={checkpoint}", *COMMON, *overrides])


def flip_a_bit(file: Path, at: int) -> None:
    """As unnoticed as a program can: size and times stay."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << at % 8]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_equal_checkpoints_in_two_folders_are_one_namespace(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "another-name"
    shutil.copytree(checkpoint, other)
    assert lasting_namespace(plan_of(checkpoint)) == lasting_namespace(plan_of(other))


def test_one_bit_of_a_weight_is_another_namespace(checkpoint: Path) -> None:
    plan, file = plan_of(checkpoint), checkpoint / "model.safetensors"
    found, places = {lasting_namespace(plan)}, random.Random(0)
    for _ in range(60):
        flip_a_bit(file, places.randrange(file.stat().st_size // 2, file.stat().st_size))
        found.add(lasting_namespace(plan))
    assert len(found) == 61


def test_another_file_in_the_place_of_the_first_is_another_namespace(checkpoint: Path) -> None:
    plan, file = plan_of(checkpoint), checkpoint / "model.safetensors"
    before, status = lasting_namespace(plan), file.stat()
    copy = file.with_suffix(".new")
    shutil.copyfile(file, copy)
    flip_a_bit(copy, status.st_size - 1)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(copy, file)
    assert lasting_namespace(plan) != before


def test_an_engine_without_stores_is_another_one_after_any_change_of_its_files(checkpoint: Path) -> None:
    plan, file = plan_of(checkpoint), checkpoint / "model.safetensors"
    files = file_states(checkpoint)
    before = identity_of(plan, "", files)
    assert identity_of(plan, "", files) == before != identity_of(plan_of(checkpoint, "kv_format=int8"), "", files)
    flip_a_bit(file, file.stat().st_size - 1)
    assert identity_of(plan, "", file_states(checkpoint)) != before and identity_of(plan, "lasting", []) == "lasting"


def test_weights_that_change_while_they_are_read_are_not_named_by_what_is_there_then(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys and values would be found by engines with the new ones."""
    plan, file, load = plan_of(checkpoint, "kv_store=[host]"), checkpoint / "model.safetensors", Rank.load

    def load_and_replace(self: Rank) -> object:
        loaded = load(self)
        flip_a_bit(file, file.stat().st_size - 1)
        return loaded

    monkeypatch.setattr(Rank, "load", load_and_replace)
    with pytest.raises(CheckpointError, match="were changed while they were read; start the engine again"):
        build_engine(plan)


def test_a_drafter_s_weights_are_in_the_namespace(checkpoint: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(checkpoint / "drafters" / "draft_model", drafter)
    plan = plan_of(checkpoint, "drafter=draft_model", f"drafter.path={drafter}")
    before = lasting_namespace(plan, drafter)
    flip_a_bit(drafter / "model.safetensors", 5000)
    assert lasting_namespace(plan, drafter) != before
    shipped = lasting_namespace(plan)
    flip_a_bit(checkpoint / "drafters" / "draft_model" / "model.safetensors", 5000)
    assert lasting_namespace(plan) != shipped


@pytest.mark.parametrize(
    "override",
    [
        "quantizer=int8",
        "quantizer=int4",
        "quantizer=int4 quantizer.group_size=64",
        "quantizer=int8 quantizer.activations=int8",
        "kv_format=fp8",
        "kv_format=int8",
        "model.dtype=bfloat16",
        "execution=eager",
        "model.max_len=512",
        "drafter=early_exit",
        "drafter=eagle3",
    ],
)
def test_settings_that_change_keys_and_values_are_other_namespaces(checkpoint: Path, override: str) -> None:
    base = plan_of(checkpoint, "model.dtype=float32")
    other = plan_of(checkpoint, "model.dtype=float32", *override.split())
    assert lasting_namespace(base) != lasting_namespace(other)
    assert passing_namespace(base) != passing_namespace(other)


@pytest.mark.parametrize(
    "override",
    [
        "scheduler=continuous",
        "kv_allocator=paged",
        "constraint=llguidance",
        "seed=7",
        "kv_store=[host,disk]",
        "kv_store=[host] kv_store.host.max_bytes=9999999",
    ],
)
def test_settings_that_do_not_are_the_same_one(checkpoint: Path, override: str) -> None:
    assert lasting_namespace(plan_of(checkpoint)) == lasting_namespace(plan_of(checkpoint, *override.split()))


def test_what_the_model_says_of_positions_is_in_the_namespace(checkpoint: Path) -> None:
    plan = plan_of(checkpoint)
    raw: dict[str, Any] = {**plan.model.raw, "rope_theta": 1234.0}
    other = replace(plan, model=replace(plan.model, raw=raw))
    assert lasting_namespace(plan) != lasting_namespace(other)


def test_a_kept_digest_is_not_trusted_where_others_could_write(checkpoint: Path, tmp_path: Path) -> None:
    keep = tmp_path / "cache" / "engine" / "digests"
    digest = content_digest(checkpoint)
    assert list(keep.iterdir())
    keep.chmod(0o777)
    for kept in keep.iterdir():
        kept.write_bytes(kept.read_bytes().replace(b'"digest":"', b'"digest":"f'))
    assert content_digest(checkpoint) == digest
