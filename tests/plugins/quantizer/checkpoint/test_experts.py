"""Quantized mixtures of experts: logits are those of the dense weights that the checkpoint stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.plugins.quantizer.checkpoint import mixtures
from tests.plugins.quantizer.checkpoint.mixtures import difference, loop, write_mixture
from tests.plugins.quantizer.checkpoint.reference import LARGEST
from tests.plugins.quantizer.checkpoint.writers import CASES
from tests.selection import few
from torch import Tensor

from engine.checkpoint.tensors import CheckpointError

NAMES = (
    "ct fp8 channel", "ct fp8 block", "ct int8 channel", "ct w4 g32 asym", "ct w4 g16 actorder", "fp8 block",
    "fp8 tensor", "modelopt fp8", "awq g32", "gptq w4 g32 sym", "gptq w4 g16 asym desc_act", "gptq w8 g32 asym",
)  # fmt: skip
BY_TORCH = ("ct int8 channel", "fp8 block", "gptq w4 g16 asym desc_act")
"""One of each kind of numbers; the others, which are read alike, by the C++ kernels alone in the default run."""


@few(6)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=() if kernels == "native" or name in BY_TORCH else pytest.mark.slow)
        for name in NAMES
        for kernels in ("torch", "native")
    ],
)
def test_experts_one_by_one_beside_a_shared_one(name: str, kernels: str, tmp_path: Path) -> None:
    assert difference(*write_mixture(tmp_path, CASES[name]), kernels) <= LARGEST


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", ["fp8 block", "ct w8 g32 asym", "gptq w4 g16 sym desc_act"])
def test_latent_attention_whose_projections_of_heads_are_quantized(name: str, kernels: str, tmp_path: Path) -> None:
    """``kv_b_proj``, which is absorbed, in blocks as DeepSeek-V3 is published, and as libraries store any layer."""
    assert difference(*write_mixture(tmp_path, CASES[name], "deepseek_v3"), kernels) <= LARGEST


@pytest.mark.parametrize("name", ["ct w4 g32 sym", "fp8 block", "awq g32", "gptq w4 g32 asym"])
def test_experts_by_mixtral_s_names(name: str, tmp_path: Path) -> None:
    assert difference(*write_mixture(tmp_path, CASES[name], "mixtral")) <= LARGEST


def store_together(folder: Path) -> Path:
    """Experts one by one in the file before."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in mixtures.together(load_file(file)).items()}, file)
    return folder


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_experts_in_blocks_of_fp8_that_are_stored_together(kernels: str, tmp_path: Path) -> None:
    """As transformers holds them: ``gate_up_proj`` and ``gate_up_proj_scale_inv`` of all experts."""
    quantized, dense = write_mixture(tmp_path, CASES["fp8 block"])
    names = set(load_file(store_together(quantized) / "model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj_scale_inv" in names
    assert not any(".experts.0." in name for name in names)
    assert difference(quantized, dense, kernels) <= LARGEST
    assert difference(quantized, store_together(dense), kernels) <= LARGEST


def change(folder: Path, name: str, tensor: Tensor | None, becomes: str = "") -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({becomes or name: tensor} if tensor is not None else {}), file)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        loop(folder)
    return str(refused.value)


def test_experts_that_are_stored_together_are_refused_by_name_and_shape(tmp_path: Path) -> None:
    quantized, _ = write_mixture(tmp_path, CASES["fp8 block"])
    layer = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(store_together(quantized) / "model.safetensors")
    scale = tensors[f"{layer}_scale_inv"]
    change(quantized, f"{layer}_scale_inv", scale[:, :3].contiguous())
    assert f"{layer}_scale_inv[expert] has shape [3, 2], expected [6, 2]" in refusal(quantized)
    change(quantized, f"{layer}_scale_inv", scale[:3].contiguous())
    assert f"{layer}_scale_inv has shape [3, 6, 2], expected 4 experts first" in refusal(quantized)
    change(quantized, f"{layer}_scale_inv", None)
    assert f"expected {layer}_scale_inv[expert] or {layer}_scale[expert]" in refusal(quantized)
    change(quantized, layer, tensors[layer], f"{layer}_words")
    assert f"{layer}_words: the configuration says that these experts are" in refusal(quantized)
