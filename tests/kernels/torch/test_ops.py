"""Single ops in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.contracts.ops import Scale
from engine.kernels.settings import Lowering
from engine.kernels.torch.ops import scale_factor
from engine.testing.attention_cases import PlainFormat
from engine.testing.plain import PlainAttention

LOWERING = Lowering("cpu", torch.float32, PlainAttention(), PlainFormat(), ())


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, 55.42562484741211), (torch.bfloat16, 55.5)])
def test_a_factor_may_be_one_of_the_compute_dtype(dtype: torch.dtype, rounded: float) -> None:
    lowering, root = replace(LOWERING, dtype=dtype), 3072**0.5
    assert scale_factor(lowering, Scale(root)) == root
    assert scale_factor(lowering, Scale(root, rounded=True)) == rounded
