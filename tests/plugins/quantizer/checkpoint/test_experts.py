"""Quantized mixtures of experts: logits are those of the dense weights that the checkpoint stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.plugins.quantizer.checkpoint import mixtures
from tests.plugins.quantizer.checkpoint.mixtures import MIXTRAL, QWEN2, difference, loop
from tests.plugins.quantizer.checkpoint.reference import LARGEST
from tests.plugins.quantizer.checkpoint.writers import CASES, Case, write_case
from torch import Tensor

from engine.checkpoint.tensors import CheckpointError

NOT_CONVERTED = {
    "compressed-tensors": ("ignore", ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]),
    "fp8": ("modules_to_not_convert", ["mlp.gate", "mlp.shared_expert_gate"]),
    "modelopt": ("exclude_modules", ["lm_head", "*.mlp.gate", "*shared_expert_gate"]),
    "awq": ("modules_to_not_convert", None),
    "gptq": ("modules_to_not_convert", None),
}
"""How each format says that gates of experts are left alone; the last two need not."""


def write_mixture(folder: Path, case: Case, family: str = "qwen2_moe") -> tuple[Path, Path]:
    key, names = NOT_CONVERTED[case.quantization["quant_method"]]
    quantization = {**case.quantization}
    inner = quantization["quantization"] = {**quantization["quantization"]} if key == "exclude_modules" else {}
    (inner if inner else quantization)[key] = names
    case = replace(case, quantization=quantization, extra={}, left=())
    return write_case(folder, case, mixtures.weights(family), {"qwen2_moe": QWEN2, "mixtral": MIXTRAL}[family])


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "name",
    ["ct fp8 channel", "ct fp8 block", "ct int8 channel", "ct w4 g32 asym", "ct w4 g16 actorder", "fp8 block",
     "fp8 tensor", "modelopt fp8", "awq g32", "gptq w4 g32 sym", "gptq w4 g16 asym desc_act", "gptq w8 g32 asym"],
)  # fmt: skip
def test_experts_one_by_one_beside_a_shared_one(name: str, kernels: str, tmp_path: Path) -> None:
    assert difference(*write_mixture(tmp_path, CASES[name]), kernels) <= LARGEST


@pytest.mark.parametrize("name", ["ct w4 g32 sym", "fp8 block", "awq g32", "gptq w4 g32 asym"])
def test_experts_by_mixtral_s_names(name: str, tmp_path: Path) -> None:
    assert difference(*write_mixture(tmp_path, CASES[name], "mixtral")) <= LARGEST
