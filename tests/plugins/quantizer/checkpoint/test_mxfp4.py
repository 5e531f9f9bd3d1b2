"""Experts in MXFP4, as gpt-oss is published: read exactly, kept in 4 bits, refused where they are something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.quantizer.checkpoint import mixtures
from tests.plugins.quantizer.checkpoint.mixtures import EXPERTS, GPT_OSS, HIDDEN, SIZE, difference, loop, reader
from tests.plugins.quantizer.checkpoint.reference import LARGEST
from torch import Tensor

from engine.assembly.model_config import model_config
from engine.checkpoint.tensors import CheckpointError
from engine.contracts.model import DeviceFacts
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.packing import Target, pack_weight
from engine_plugins.quantizer.checkpoint.layouts.mxfp4 import read
from engine_plugins.quantizer.checkpoint.methods import recipe_of, unreadable

CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
LAYER = "model.layers.1.mlp.experts"


def number(bits: int) -> float:
    """e2m1 by its definition: a sign, two bits of exponent with a bias of 1, one of mantissa; no infinity, no NaN."""
    sign, exponent, mantissa = -1.0 if bits & 8 else 1.0, bits >> 1 & 3, bits & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[experts, out, in]`` of uint8 ``[experts, out, in / 32, 16]`` and ``[experts, out, in / 32]``."""
    table = torch.tensor([number(bits) for bits in range(16)])
    pairs = torch.stack((table[(blocks % 16).int()], table[(blocks // 16).int()]), dim=-1).flatten(-2)
    return (pairs * 2.0 ** (scales.double() - 127)[..., None]).float().flatten(-2)


def random_mxfp4(out: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, out, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 125, (EXPERTS, out, inputs // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def write(folder: Path, layers: int = mixtures.LAYERS) -> tuple[Path, Path]:
    """A checkpoint and its dense copy, in the layout of unquantized ones: inputs before outputs."""
    dense = mixtures.weights("gpt_oss", layers)
    quantized = dict(dense)
    for seed, name in enumerate(sorted(name for name in dense if name.endswith("_proj") and "experts" in name)):
        inputs, out = dense[name].shape[1:]
        blocks, scales = random_mxfp4(out, inputs, seed)
        dense[name] = dequantized(blocks, scales).transpose(1, 2).contiguous()
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for kind, tensors, more in (("quantized", quantized, {"quantization_config": CONFIG}), ("dense", dense, {})):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(GPT_OSS | {"num_hidden_layers": layers} | more))
        save_file(tensors, folder / kind / "model.safetensors")
    return folder / "quantized", folder / "dense"


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    return write(tmp_path)[0]


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_logits_are_those_of_the_dense_weights(kernels: str, tmp_path: Path) -> None:
    assert difference(*write(tmp_path), kernels) <= LARGEST


def test_every_number_and_every_scale_is_read_exactly() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)
    scheme = recipe_of(CONFIG).schemes[0]
    found = read(scheme, "w", {"blocks": blocks, "scales": scales}, 512).dense()
    want = torch.tensor([number(bits) for byte in range(256) for bits in (byte % 16, byte // 16)]).double()
    assert torch.equal(found, (want * 2.0 ** (torch.arange(255.0).double() - 127)[:, None]).float())


def test_the_weights_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    blocks, scales = random_mxfp4(24, 96, 5)
    theirs = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    scheme = recipe_of(CONFIG).schemes[0]
    for expert in range(EXPERTS):
        mine = read(scheme, "w", {"blocks": blocks[expert], "scales": scales[expert]}, 96)
        assert torch.equal(mine.dense(), theirs[expert].T)


def test_weights_stay_in_4_bits(quantized: Path) -> None:
    spec = LinearSpec((LinearPart(f"{LAYER}.gate_up_proj", 2 * SIZE, True, (SIZE, SIZE)),), HIDDEN, kind="gate_up")
    blocks, scales = random_mxfp4(2 * SIZE, HIDDEN, 1)
    part = {"blocks": blocks[0], "scales": scales[0], "bias": torch.zeros(2 * SIZE)}
    weight = reader(quantized).pack(spec, [part], torch.float32, "cpu")
    assert isinstance(weight, QuantizedWeight)
    made = pack_weight(spec, weight, Target("cpu", torch.float32, in_panels=True))
    assert made.tensors["weight"].nbytes == 2 * SIZE * HIDDEN // 2
    assert "fp4 panels (groups of 32)" in made.label and "mxfp4 group 32; weights only" in made.label


def test_modules_that_are_not_converted_are_read_as_they_are(tmp_path: Path) -> None:
    quantized, dense = write(tmp_path)
    plain, file = load_file(dense / "model.safetensors"), quantized / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(f"{LAYER}.")}
    save_file(stored | {name: tensor for name, tensor in plain.items() if name.startswith(f"{LAYER}.")}, file)
    left = CONFIG | {"modules_to_not_convert": ["model.layers.1.mlp.experts"]}
    (quantized / "config.json").write_text(json.dumps(GPT_OSS | {"quantization_config": left}))
    assert difference(quantized, dense) <= LARGEST


def refusal(folder: Path, **tensors: Tensor | None) -> str:
    """With these tensors of a layer's experts instead; ``None``: without."""
    file = folder / "model.safetensors"
    stored = load_file(file) | {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError) as refused:
        loop(folder)
    return str(refused.value)


def test_what_is_no_mxfp4_is_refused_by_name_shape_and_dtype(quantized: Path) -> None:
    blocks, scales = random_mxfp4(2 * SIZE, HIDDEN, 1)
    name = f"{LAYER}.gate_up_proj"
    short = refusal(quantized, gate_up_proj_blocks=blocks[:, :, :1])
    assert f"{name}_blocks[expert] has shape [192, 1, 16], expected [192, 2, 16]" in short
    fewer = refusal(quantized, gate_up_proj_blocks=blocks[:3])
    assert f"{name}_blocks has shape [3, 192, 2, 16], expected 4 experts first" in fewer
    wide = refusal(quantized, gate_up_proj_blocks=blocks, gate_up_proj_scales=scales.float())
    assert f"{name}_scales[expert] is float32, expected uint8 or float8_e8m0fnu" in wide
    assert f"missing from the checkpoint: {name}_scales" in refusal(quantized, gate_up_proj_scales=None)
    bad = scales.clone()
    bad[2, 7, 1] = 255
    assert f"{name}_scales holds 255" in refusal(quantized, gate_up_proj_scales=bad)
    plain = torch.zeros(EXPERTS, HIDDEN, 2 * SIZE)
    said = refusal(quantized, gate_up_proj_scales=None, gate_up_proj_blocks=None, gate_up_proj=plain)
    assert f"{name}: the configuration says that these experts are {name}_blocks and {name}_scales" in said


def test_experts_in_4_bits_that_are_said_not_to_be_converted_are_refused(quantized: Path) -> None:
    left = CONFIG | {"modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    (quantized / "config.json").write_text(json.dumps(GPT_OSS | {"quantization_config": left}))
    said = refusal(quantized)
    name = f"{LAYER}.gate_up_proj"
    assert f"{name}_blocks, {name}_scales: the configuration says that these experts are {name}" in said


def test_the_configuration_is_checked_without_tensors(quantized: Path) -> None:
    odd = CONFIG | {"modules_to_not_convert": "lm_head"}
    (quantized / "config.json").write_text(json.dumps(GPT_OSS | {"quantization_config": odd}))
    (reason,) = unreadable(model_config(str(quantized)), DeviceFacts("cpu"))
    assert "modules_to_not_convert='lm_head': expected a list of names" in reason
