"""Quantized experts by Triton kernels: one weight of all experts, whatever form the checkpoint has them in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.quantizer.checkpoint import test_mxfp4
from tests.plugins.quantizer.checkpoint.mixtures import difference, loop, write_mixture
from tests.plugins.quantizer.checkpoint.reference import LARGEST
from tests.plugins.quantizer.checkpoint.writers import CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ct w4 g32 asym", "fp8 block"])
def test_experts_one_by_one(name: str, tmp_path: Path) -> None:
    assert difference(*write_mixture(tmp_path, CASES[name], layers=1), "triton") <= LARGEST


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    assert difference(*test_mxfp4.write(tmp_path, layers=1), "triton") <= LARGEST


def test_experts_in_activation_order_are_refused(tmp_path: Path) -> None:
    quantized, _ = write_mixture(tmp_path, CASES["gptq w4 g16 sym desc_act"], layers=1)
    with pytest.raises(ValueError, match=r"in activation order.*no tile loader, which execution="):
        loop(quantized, "triton")
