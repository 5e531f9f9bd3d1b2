"""The C++ kernels between the linear layers against the reference chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import LayerCache
from engine.kernels.cpu import layer_ops
from engine.kernels.cpu.layer_ops import HeadNorm, RotateAndWrite, compiled_gate, compiled_norm
from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.reference import gated_activation
from engine.kernels.torch.rope import rotate
from engine.native import loader, shared_library
from engine.testing.attention_cases import PlainFormat
from tests.needs import needs_compiler, needs_x86

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 7, 64, 700)
"""The last is large enough for several threads."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    """Within one rounding of the dtype (float32: a few, for the order of the sums)."""
    assert got.shape == want.shape and got.dtype == want.dtype
    eps = 2e-6 if want.dtype == torch.float32 else 2.0**-8
    assert torch.allclose(got.double(), want.double(), rtol=eps, atol=eps * float(want.double().abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 100, 896])
def test_the_norm_equals_the_reference_also_for_views(size: int, dtype: torch.dtype) -> None:
    weight = random(size, seed=1)
    norm = compiled_norm(weight, 1e-5, dtype)
    for rows in ROWS:
        x = random(rows, size, dtype=dtype)
        close(norm(x), rms_norm(x, weight, 1e-5))
        wide = random(rows, size + 24, dtype=dtype)
        close(norm(wide[:, 24:]), rms_norm(wide[:, 24:], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 24, 4864])
def test_the_gate_equals_the_reference(size: int, act: str, dtype: torch.dtype) -> None:
    gate = compiled_gate(act, dtype)
    for rows in ROWS:
        gate_up = random(rows, 2 * size, dtype=dtype) * 4
        close(gate(gate_up), gated_activation(gate_up.float(), act).to(dtype))


FAR = (88.0, 104.0, 1e30, 3e38)
"""Where an exponential over- or underflows, and almost the largest number."""


@pytest.mark.parametrize("processor", [None, pytest.param("x86-64", marks=needs_x86)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_the_gate_is_right_far_from_zero(act: str, processor: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in code for processors without wide vectors. A NaN stays one."""
    if processor is not None:
        here = native.find_compiler()
        assert not isinstance(here, str)
        older = replace(here, command=(*here.command, f"-march={processor}"))
        monkeypatch.setattr(shared_library, "find_compiler", lambda: older)
        uncached = shared_library.open_library.__wrapped__
        for module in (shared_library, loader):
            monkeypatch.setattr(module, "open_library", uncached)
        monkeypatch.setattr(layer_ops, "kernels", layer_ops.kernels.__wrapped__)
    inf = float("inf")
    values = torch.tensor([0.0, -0.0, *FAR, *(-far for far in FAR), inf, -inf, float("nan")])
    got = compiled_gate(act, torch.float32)(torch.cat((values, torch.ones_like(values)))[None])[0]
    want = gated_activation(torch.cat((values, torch.ones_like(values)))[None].double(), act)[0]
    assert torch.allclose(got.double(), want, atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (80, 80), (8, 0)])
def test_heads_are_normed_rotated_and_written(
    head_dim: int, rotary_dim: int, head_norm: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads, block_size = 6, 2, 4
    norms = [HeadNorm(random(head_dim, seed=i), 1e-6 * i) if head_norm else None for i in (2, 3)]
    op = RotateAndWrite(heads, kv_heads, head_dim, rotary_dim, *norms, dtype)
    for tokens in (1, 3, 200):
        qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=tokens)
        q, k, v = qkv.clone().view(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
        angles = random(tokens, 1, max(rotary_dim // 2, 1), seed=5)
        rotation = (angles.cos(), angles.sin()) if rotary_dim else None
        slots = torch.randperm(400, generator=torch.Generator().manual_seed(6))[:tokens]
        keys, values = (torch.zeros(100, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        op(qkv, rotation, slots, LayerCache(keys, values, PlainFormat()))

        def reference(x: Tensor, norm: HeadNorm | None, rotation: object = rotation) -> Tensor:
            x = x.float() if norm is None else rms_norm(x, norm.weight, norm.eps).float()
            return (x if rotation is None else rotate(x, *rotation)).to(dtype)  # type: ignore[misc]

        got = qkv.view(tokens, -1, head_dim)
        close(got[:, :heads], reference(q, norms[0]))
        close(got[:, heads : heads + kv_heads], reference(k, norms[1]))
        assert torch.equal(got[:, heads + kv_heads :], v)
        assert torch.equal(keys.flatten(0, 1)[slots], got[:, heads : heads + kv_heads])
        assert torch.equal(values.flatten(0, 1)[slots], v)
        written = torch.zeros(400, dtype=torch.bool).index_fill_(0, slots, True)
        assert not keys.flatten(0, 1)[~written].any() and not values.flatten(0, 1)[~written].any()


def test_without_a_cache_values_are_left_alone() -> None:
    op = RotateAndWrite(2, 1, 8, 8, None, None, torch.float32)
    qkv, angle = random(1, 32), random(1, 1, 4)
    v = qkv[:, 24:].clone()
    op(qkv, (angle.cos(), angle.sin()), torch.zeros(1, dtype=torch.int64), None)
    assert torch.equal(qkv[:, 24:], v)
