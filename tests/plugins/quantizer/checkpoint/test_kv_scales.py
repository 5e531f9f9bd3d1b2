"""Scales for the KV cache: found under every name they have, checked, and handed to the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.quantizer.checkpoint.reference import loaded, reader
from tests.plugins.quantizer.checkpoint.writers import CASES, Case, ct_fp8, write_case
from tests.selection import few

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import KVScaleReader
from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat

SPELLINGS = {
    "attention": ("self_attn.k_scale", "self_attn.v_scale"),
    "attention module": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "outputs of projections": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}

FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def with_scales(key: str, value: str, key_scale: Any, value_scale: Any, kv: dict[str, Any] | None = None) -> Case:
    scales = {}
    for i in range(3):
        scales[f"model.layers.{i}.{key}"] = torch.as_tensor(key_scale) * (i + 1)
        scales[f"model.layers.{i}.{value}"] = torch.as_tensor(value_scale) * (i + 1)
    return replace(ct_fp8("channel", kv_cache_scheme=kv or FP8_CACHE), extra=scales)


@few(3)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_layer_is_that_of_every_head(spelling: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    case = with_scales(*SPELLINGS[spelling], torch.full(shape, 0.5), torch.full(shape, 0.25).bfloat16())
    scales = loaded(write_case(tmp_path, case)[0]).kv_scales
    assert len(scales) == 3
    for layer, found in enumerate(scales):
        assert found is not None
        key, value = found
        assert key.dtype == value.dtype == torch.float32
        assert key.tolist() == [0.5 * (layer + 1)] * 2 and value.tolist() == [0.25 * (layer + 1)] * 2


def test_a_scale_for_each_head_keeps_its_head(tmp_path: Path) -> None:
    by_head = torch.tensor([0.5, 2.0]).reshape(2, 1, 1)
    found = loaded(write_case(tmp_path, with_scales(*SPELLINGS["attention"], by_head, by_head))[0]).kv_scales[0]
    assert found is not None and found[0].tolist() == [0.5, 2.0]


def test_where_queries_keys_and_values_are_one_projection_scales_are_those_of_attention(tmp_path: Path) -> None:
    found = reader(write_case(tmp_path, CASES["modelopt fp8"])[0])
    assert isinstance(found, KVScaleReader)
    part = LinearPart("layers.0.self_attn.qkv_proj", 48, slices=(16, 16, 16))
    names = found.kv_scale_names(LinearSpec((part,), 64))
    assert names.key[:2] == ("layers.0.self_attn.k_scale", "layers.0.self_attn.attn.k_scale")
    assert names.value[:2] == ("layers.0.self_attn.v_scale", "layers.0.self_attn.attn.v_scale")


def test_modelopt_scales_are_found(tmp_path: Path) -> None:
    found = loaded(write_case(tmp_path, CASES["modelopt fp8"])[0]).kv_scales[2]
    assert found is not None
    assert found[0].tolist() == pytest.approx([0.03, 0.03]) and found[1].tolist() == pytest.approx([0.06, 0.06])


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    assert loaded(write_case(tmp_path, ct_fp8("channel"))[0]).kv_scales == (None, None, None)


def test_scales_for_an_integer_cache_are_known_and_not_taken_for_float8(tmp_path: Path) -> None:
    kv = FP8_CACHE | {"type": "int"}
    case = with_scales(*SPELLINGS["attention"], 0.5, 0.5, kv)
    assert loaded(write_case(tmp_path, case)[0]).kv_scales == (None, None, None)


@pytest.mark.parametrize(
    ("key_scale", "expected"),
    [(0.0, r"self_attn\.k_scale holds \[0\.0\]: a scale is a positive number"), (-1.0, r"holds \[-1\.0\]"),
     (torch.nan, "holds .nan.: a scale"), ([1.0, 1.0, 1.0], r"k_scale has shape \[3\], expected one scale or 2")],
)  # fmt: skip
def test_a_scale_that_cannot_be_is_named(key_scale: Any, expected: str, tmp_path: Path) -> None:
    case = with_scales(*SPELLINGS["attention"], key_scale, 1.0)
    with pytest.raises(CheckpointError, match=expected):
        loaded(write_case(tmp_path, case)[0])


@few(3)
@pytest.mark.parametrize("kv_format", [NativeFormat, Int8Format])
@pytest.mark.parametrize("key_scale", [0.0, torch.nan, [1.0, 1.0, 1.0]])
def test_a_scale_that_no_cache_takes_refuses_nothing(key_scale: Any, kv_format: Any, tmp_path: Path) -> None:
    case = with_scales(*SPELLINGS["attention"], key_scale, 1.0)
    assert loaded(write_case(tmp_path, case)[0], kv_format=kv_format).kv_scales == (None, None, None)


def test_a_scale_that_is_no_floating_point_number_is_named(tmp_path: Path) -> None:
    case = with_scales(*SPELLINGS["attention"], torch.tensor(1), 1.0)
    with pytest.raises(CheckpointError, match=r"k_scale is torch.int64, expected a floating.*kv_format=NAME"):
        loaded(write_case(tmp_path, case)[0])


def test_scales_of_a_layer_that_is_not_there_are_named(tmp_path: Path) -> None:
    case = replace(ct_fp8("channel"), extra={"model.layers.7.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.7\.self_attn\.k_scale"):
        loaded(write_case(tmp_path, case)[0])


def test_a_scale_for_keys_alone_is_refused(tmp_path: Path) -> None:
    case = replace(ct_fp8("channel"), extra={"model.layers.0.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"a scale for cached keys, but none of .*\.self_attn\.v_scale"):
        loaded(write_case(tmp_path, case)[0])


def test_one_scale_may_serve_keys_and_values(tmp_path: Path) -> None:
    scales = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(0.5) for i in range(3)}
    found = loaded(write_case(tmp_path, replace(ct_fp8("channel"), extra=scales))[0]).kv_scales[1]
    assert found is not None and found[0].tolist() == found[1].tolist() == [0.5, 0.5]
