"""The vocabulary projection under ``quantizer=int4``, by ``quantizer.head``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kernels import tiny
from tests.selection import few

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.startup.rank import load_plan
from engine_plugins.quantizer.rounding import to_int4, to_int8

GROUP = 32


@few(4)
@pytest.mark.parametrize("execution", ["compile", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["int4", "int8", "none"])
def test_the_head_is_rounded_as_asked_and_multiplies_as_its_rounded_weights(
    head: str, dtype: str, execution: str, tmp_path: Path
) -> None:
    tiny.write(tmp_path)
    overrides = [f"model.path={tmp_path}", "device=cpu", f"model.dtype={dtype}", f"execution={execution}"]
    plan = assemble([*overrides, "quantizer=int4", f"quantizer.group_size={GROUP}", f"quantizer.head={head}"])
    with torch.inference_mode():
        model = load_plan(plan, bind(plan))
        weights = tiny.weights()
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
        got = model.head(x).float()
        stored = weights["lm_head.weight"].to(x.dtype)
    table = weights["lm_head.weight"]
    rounded = {"int4": to_int4(table, None, GROUP), "int8": to_int8(table, None)}
    weight = rounded[head].dense() if head in rounded else stored.float()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * weights["model.norm.weight"]
    want = normed.to(x.dtype).float() @ weight.T
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert float((got - want).abs().max() / want.abs().max()) < tolerance
    (line,) = [line for line in model.lowering if line.partition(":")[0] in ("linear", "norm, linear")]
    assert head == "none" or head in line
    assert head != "none" or "int" not in line.partition(":")[2].replace("integers", "")
