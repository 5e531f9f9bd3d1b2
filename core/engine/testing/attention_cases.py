"""Cases of attention (:mod:`engine.startup.checks.attention_cases`, and large ones), and a kernel's error on them.

``measure`` runs one case; :mod:`engine.testing.attention_kernel` makes pytest tests of them. Cache memory that no
query may see is filled with NaN, so a kernel that as much as multiplies it by zero fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import DeviceFacts
from engine.contracts.provider import BuildContext
from engine.kernels.torch.reference import paged_attention, paged_attention_lse
from engine.startup.checks.attention_cases import SMALL_CASES as SMALL_CASES
from engine.startup.checks.attention_cases import AttentionCase as AttentionCase
from engine.startup.checks.attention_cases import AttentionInputs as AttentionInputs
from engine.startup.checks.attention_cases import make_inputs as inputs_of
from engine.startup.checks.attention_cases import of_rank as of_rank
from engine.testing.context import build_context

TOLERANCE: dict[str, float] = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Largest accepted ``|got - want| / (1 + |want|)``. In 16 bits the softmax weights and the output may each be cut to
the dtype once (2**-8 relative in bfloat16 when truncating, half of it when rounding); the inputs are exact."""


LARGE_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("long_prompt", ((2048, 2048),), 32, 8, 128, 16),
    AttentionCase("long_chunk", ((1000, 5003),), 32, 8, 128, 16),
    AttentionCase("long_chunk_beside_decode", ((1, 4000), (1500, 1501), (1, 77), (5, 900)), 32, 8, 128, 16),
    AttentionCase("prompts_of_unequal_lengths", ((700, 700), (3, 3), (1301, 1301)), 14, 2, 64, 32),
    AttentionCase("long_prompt_window", ((1500, 1500),), 32, 8, 128, 16, window=512),
    AttentionCase("long_prompt_chunked", ((1500, 1500), (1, 1025)), 32, 8, 128, 16, chunk=512),
    AttentionCase("long_prompt_soft_cap", ((900, 1800),), 16, 8, 256, 64, soft_cap=50.0),
    AttentionCase("long_decode", ((1, 20011),), 32, 8, 128, 16),
    AttentionCase("decode_batch", tuple((1, 17 * i + 1) for i in range(64)), 32, 8, 128, 16),
    AttentionCase("verify_batch", tuple((8, 300 * i + 8) for i in range(8)), 32, 8, 128, 256),
    AttentionCase("head_dim_80_long", ((600, 600), (1, 3000)), 32, 32, 80, 16),
    AttentionCase("head_dim_96_long", ((600, 600), (1, 3000)), 32, 32, 96, 16),
    AttentionCase("sinks_long", ((1, 5000), (700, 1300)), 64, 8, 64, 16, sinks=True),
    AttentionCase("sinks_window_long", ((1, 5000), (700, 1300)), 64, 8, 64, 16, window=128, sinks=True),
    AttentionCase("latent_long_decode", ((1, 9001), (4, 300)), 128, 1, 576, 64, value_dim=512),
    AttentionCase("latent_prompt", ((300, 700),), 128, 1, 576, 64, value_dim=512),
)
"""For a real device: long prefill, long contexts, real head counts."""


class PlainFormat:
    """Keys and values stored as they are; what kernels are tested with when no format is given."""

    scale: Literal["none", "per_layer_head", "per_token_head"] = "none"
    lossless = True

    def storage_dtype(self, compute_dtype: str) -> str:
        return compute_dtype

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return x.to(dtype)

    def load_tile(self) -> Any | None:
        return None

    def store_tile(self) -> Any | None:
        return None


class Int8Format(PlainFormat):
    """Keys and values in int8, with scales of either granularity."""

    lossless = False

    def __init__(self, scale: Literal["per_layer_head", "per_token_head"]) -> None:
        self.scale = scale

    def storage_dtype(self, compute_dtype: str) -> str:
        return "int8"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() / scale[..., None]).round().clamp(-127.0, 127.0).to(torch.int8)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return (x.float() * scale[..., None]).to(dtype)


class NarrowFormat(PlainFormat):
    """Keys and values in float16 without scales, whatever is computed with."""

    lossless = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float16"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float().clamp(-65504.0, 65504.0).half()


FORMATS: dict[str, KVFormat] = {
    "int8_per_layer_head": Int8Format("per_layer_head"),
    "int8_per_token_head": Int8Format("per_token_head"),
    "float16": NarrowFormat(),
}
"""What any kernel reads besides the compute dtype: storage that a plain load reads, with scales and without."""


def make_inputs(
    case: AttentionCase, dtype: str, device: str, kv_format: KVFormat | None = None, padding_rows: int = 0,
    tables_of: AttentionCase | None = None,
) -> AttentionInputs:  # fmt: skip
    """As :func:`engine.startup.checks.attention_cases.make_inputs`, on plain keys and values unless a format is
    given."""
    return inputs_of(case, dtype, device, kv_format or PlainFormat(), padding_rows, tables_of)


def reference(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """The definition: ``[num_tokens, num_heads * op.out_dim]`` in float64."""
    return paged_attention(inputs.batch, case.op, inputs.q, inputs.cache, inputs.sinks, exact=True)


def reference_lse(case: AttentionCase, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """:meth:`engine.contracts.attention_kernel.LogSumExpAttention.forward_lse` in float64, on the CPU."""
    out, lse = paged_attention_lse(inputs.batch, case.op, inputs.q, inputs.cache, exact=True)
    return out.cpu(), lse.cpu()


def make_context(case: AttentionCase, dtype: str, device: str) -> BuildContext:
    """A build context of a model with the case's heads. ``device``: ``cpu`` or ``cuda``."""
    plain = build_context(block_size=case.block_size, max_len=32768, max_requests=64, max_draft_tokens=8)
    model = replace(
        plain.model,
        hidden_size=case.num_heads * case.head_dim,
        attentions=(case.op,),
        dtype=dtype,
    )
    facts = DeviceFacts(kind="cuda" if device.startswith("cuda") else "cpu")
    return replace(plain, model=model, device=facts, dtype=dtype)


def run(kernel: AttentionKernel, case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """One prepare and one forward."""
    return forward(kernel, kernel.prepare(inputs.batch), case, inputs)


def forward(kernel: AttentionKernel, prepared: Any, case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    call: Callable[..., Tensor] = kernel.forward
    return call(prepared, case.op, inputs.q, inputs.cache, *inputs.more)


def error(got: Tensor, want: Tensor) -> float:
    """Largest ``|got - want| / (1 + |want|)``; NaN anywhere makes it infinite."""
    gap = (got.double() - want).abs() / (1.0 + want.abs())
    return float(gap.nan_to_num(nan=float("inf")).max())


def measure(
    make_kernel: Callable[[BuildContext], AttentionKernel],
    case: AttentionCase,
    dtype: str,
    device: str,
    kv_format: KVFormat | None = None,
) -> float:
    """Error of a freshly built kernel on one case, to be compared with :data:`TOLERANCE`."""
    inputs = make_inputs(case, dtype, device, kv_format)
    got = run(make_kernel(make_context(case, dtype, device)), case, inputs)
    assert got.shape == (inputs.q.shape[0], case.num_heads * case.op.out_dim), f"shape {tuple(got.shape)}"
    assert got.dtype == inputs.q.dtype, f"dtype {got.dtype}"
    assert got.is_contiguous(), f"strides {got.stride()}"
    return error(got, reference(case, inputs))


def case_named(name: str) -> AttentionCase:
    """One of the small or large cases."""
    return next(case for case in SMALL_CASES + LARGE_CASES if case.name == name)
