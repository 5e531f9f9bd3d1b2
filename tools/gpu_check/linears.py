"""The fused linears and what lies between them, in the shapes of real models, against float64 on the same device.

Each is launched with programmatic dependent launch on and off where the device has it: the bits must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import LayerCache
from engine.contracts.quantizer import TileLoader
from engine.kernels.triton.device import has_dependent_launch
from engine.kernels.triton.launch import (
    HeadShape,
    HeadWriter,
    Launch,
    NormWeight,
    SkinnyLinear,
    argmax_rows,
    gated_activation,
)
from engine.kernels.triton.weights import load_plain
from engine.testing.attention_cases import PlainFormat
from gpu_check.attention import verdict, worst
from gpu_check.section import Context
from gpu_check.shapes import EPS, SHAPES, TINY, Shape

TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2e-5}
"""Largest accepted ``|got - want| / (1 + |want|)``. In 16 bits the normed input is rounded once and the output once;
sums of up to 14336 products of unit size are float32's to lose."""
ROWS = (1, 2, 7, 16)
MANY = 300


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a model, a dtype, a number of rows; makes its own random inputs."""

    shape: Shape
    dtype: torch.dtype
    device: str
    rows: int

    def random(self, *size: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(size) + self.rows)
        return torch.randn(*size, generator=generator, device=self.device).to(self.dtype)

    def weight(self, out_features: int, in_features: int) -> Tensor:
        return self.random(out_features, in_features) * in_features**-0.5

    def norm(self, size: int) -> NormWeight:
        return NormWeight(1.0 + 0.2 * self.random(size).float(), EPS)


def run(context: Context) -> None:
    shapes = {"tiny": TINY} if context.dry_run else SHAPES
    for dtype in ("float32",) if context.dry_run else ("bfloat16", "float32", "float16"):
        for name, shape in shapes.items():
            metric = f"fused ops in {name} shapes, {dtype}"
            if context.has(metric):
                continue
            found: dict[str, float | str] = {}
            for rows in (1, 3) if context.dry_run else ROWS:
                few = Layer(shape, getattr(torch, dtype), context.device, rows)
                found |= {f"{op} x {rows}": worst(check) for op, check in fused(few)}
            many = Layer(shape, getattr(torch, dtype), context.device, 5 if context.dry_run else MANY)
            found |= {f"{op} x {many.rows}": worst(check) for op, check in unfused(many)}
            context.emit(verdict(metric, found, TOLERANCE[dtype]))


def fused(case: Layer) -> Iterator[tuple[str, Callable[[], float]]]:
    """The ops of a layer and the head, as one kernel each."""
    yield from {
        "qkv + RoPE + KV write": partial(qkv_error, case),
        "out + residual": partial(residual_error, case, case.shape.num_attention_heads * case.shape.head_dim),
        "gate/up + SiLU": partial(gate_error, case),
        "down + residual": partial(residual_error, case, case.shape.intermediate_size),
        "head + argmax": partial(head_error, case),
    }.items()


def unfused(case: Layer) -> Iterator[tuple[str, Callable[[], float]]]:
    """The kernels between torch's products, for many rows."""
    yield from {
        "norm + RoPE + KV write": partial(writer_error, case),
        "SiLU x up": partial(activation_error, case),
        "argmax": partial(argmax_error, case),
    }.items()


def both_ways(device: str, call: Callable[[Launch], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results without dependent launch. Raises ``AssertionError`` where those with it differ in a bit."""
    plain = replace(Launch.on(device), pdl=False)
    results = call(plain)
    if has_dependent_launch(device):
        again = call(replace(plain, pdl=True))
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True)), "PDL on and off differ"
    return results


def apart(got: Tensor, want: Tensor) -> float:
    gap = (got.double() - want).abs() / (1.0 + want.abs())
    return float(gap.nan_to_num(nan=float("inf")).max())


def normed(x: Tensor, norm: NormWeight) -> Tensor:
    """RMSNorm in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def residual_error(case: Layer, in_features: int) -> float:
    hidden = case.shape.hidden_size
    weight, x = case.weight(hidden, in_features), case.random(case.rows, in_features)
    residual = case.random(case.rows, hidden)
    want = residual.double() + x.double() @ weight.double().T

    def call(launch: Launch) -> tuple[Tensor, ...]:
        linear = SkinnyLinear(launch, TileLoader(load_plain, weight), in_features, hidden)
        return (linear.add(x, residual.clone()),)

    return apart(both_ways(case.device, call)[0], want)


def gate_error(case: Layer) -> float:
    hidden, size = case.shape.hidden_size, 2 * case.shape.intermediate_size
    weight, x, norm = case.weight(size, hidden), case.random(case.rows, hidden), case.norm(hidden)
    gate, up = (normed(x, norm) @ weight.double().T).chunk(2, dim=-1)

    def call(launch: Launch) -> tuple[Tensor, ...]:
        return (SkinnyLinear(launch, TileLoader(load_plain, weight), hidden, size, norm).gate(x, "silu"),)

    return apart(both_ways(case.device, call)[0], F.silu(gate) * up)


def head_error(case: Layer) -> float:
    """Logits, and the token of the largest: the first of equals among the kernel's own logits."""
    hidden, vocab = case.shape.hidden_size, case.shape.vocab_size
    weight, x, norm = case.weight(vocab, hidden), case.random(case.rows, hidden), case.norm(hidden)

    def call(launch: Launch) -> tuple[Tensor, ...]:
        linear = SkinnyLinear(launch, TileLoader(load_plain, weight), hidden, vocab, norm)
        logits, tokens = linear.logits(x, greedy=True)
        assert tokens is not None
        return logits, tokens

    logits, tokens = both_ways(case.device, call)
    assert torch.equal(tokens, logits.max(dim=-1).indices), "the token is not the largest logit's"
    return apart(logits, normed(x, norm) @ weight.double().T)


def heads_of(case: Layer) -> tuple[HeadShape, int]:
    shape = case.shape
    heads = HeadShape(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.head_dim)
    return heads, shape.num_attention_heads + 2 * shape.num_key_value_heads


def cache_for(case: Layer) -> tuple[Tensor, LayerCache, tuple[Tensor, Tensor]]:
    """Scattered slots for the rows, a cache of NaN, and tables of rotations."""
    heads, block = case.shape, 16
    blocks = -(-case.rows // block) + 2
    size = (blocks, block, heads.num_key_value_heads, heads.head_dim)
    keys, values = (torch.full(size, float("nan"), dtype=case.dtype, device=case.device) for _ in range(2))
    slots = torch.randperm(blocks * block, generator=torch.Generator().manual_seed(case.rows))[: case.rows]
    angles = case.random(case.rows, 1, heads.head_dim // 2).float()
    return slots.to(case.device), LayerCache(keys, values, PlainFormat()), (angles.cos(), angles.sin())


def judge_heads(
    case: Layer, q: Tensor, slots: Tensor, cache: LayerCache, want: Tensor, tables: tuple[Tensor, Tensor]
) -> float:
    """``want``: float64 ``[rows, heads + 2 kv_heads, head_dim]``, not rotated yet."""
    shape = case.shape
    queries, keys, values = want.split([shape.num_attention_heads, *[shape.num_key_value_heads] * 2], dim=1)
    cos, sin = (table.double() for table in tables)
    stored = [part.flatten(0, 1)[slots] for part in (cache.k, cache.v)]
    pairs = ((q, rotate(queries, cos, sin)), (stored[0], rotate(keys, cos, sin)), (stored[1], values))
    touched = int((~cache.k.flatten(0, 1).isnan().flatten(1).all(1)).sum())
    assert touched == case.rows, f"{touched} slots of the cache were written, expected {case.rows}"
    return max(apart(got, right) for got, right in pairs)


def qkv_error(case: Layer) -> float:
    heads, total = heads_of(case)
    hidden, size = case.shape.hidden_size, total * case.shape.head_dim
    weight, x, norm = case.weight(size, hidden), case.random(case.rows, hidden), case.norm(hidden)
    slots, cache, tables = cache_for(case)

    def call(launch: Launch) -> tuple[Tensor, ...]:
        linear = SkinnyLinear(launch, TileLoader(load_plain, weight), hidden, size, norm)
        q = linear.rope_write(x, heads, tables, slots, cache)
        return q, cache.k[~cache.k.isnan()].clone(), cache.v[~cache.v.isnan()].clone()

    q = both_ways(case.device, call)[0]
    want = (normed(x, norm) @ weight.double().T).view(case.rows, total, -1)
    return judge_heads(case, q, slots, cache, want, tables)


def writer_error(case: Layer) -> float:
    heads, total = heads_of(case)
    qkv, (slots, cache, tables) = case.random(case.rows, total * case.shape.head_dim), cache_for(case)
    norms = [case.norm(case.shape.head_dim) for _ in range(2)]
    (q,) = both_ways(case.device, lambda launch: (HeadWriter(launch, heads, *norms)(qkv, tables, slots, cache),))
    parts = qkv.view(case.rows, total, -1).split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    want = torch.cat((normed(parts[0], norms[0]), normed(parts[1], norms[1]), parts[2].double()), dim=1)
    return judge_heads(case, q, slots, cache, want, tables)


def activation_error(case: Layer) -> float:
    gate_up = case.random(case.rows, 2 * case.shape.intermediate_size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    (got,) = both_ways(case.device, lambda launch: (gated_activation(gate_up, "silu", launch),))
    return apart(got, F.silu(gate) * up)


def argmax_error(case: Layer) -> float:
    """0, or infinity where a token is wrong. Few levels, so that the largest is a tie."""
    logits = case.random(case.rows, case.shape.vocab_size).float().mul(4).round()
    (tokens,) = both_ways(case.device, lambda launch: (argmax_rows(logits, launch),))
    want = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    return 0.0 if torch.equal(tokens, want) else float("inf")
