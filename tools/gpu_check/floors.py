"""The least that a shape must read or multiply, and how long that takes: every floor and limit is computed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command itself reads rows, before it has found the engine
    from engine.testing.attention_cases import AttentionCase
    from gpu_check.draft_head import HeadShape
    from gpu_check.shapes import Shape

Rates = Mapping[str, float]
"""``read_gb_s``, ``gemm_tflop_s`` (16 bits); where they are known ``copy_gb_s``, ``fp8_tflop_s``, ``int8_tflop_s``."""

DATA_SHEETS = {
    "NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA A10G": "A10G",
}  # fmt: skip
"""What the driver calls a card, and its row in the table of data sheets."""


@dataclass(frozen=True, slots=True)
class Work:
    """What must be done at least."""

    read_bytes: float = 0.0
    flops: float = 0.0
    operands: str = "bf16"
    """What is multiplied: ``bf16``, ``fp8`` or ``int8``. Rates that do not know it are those of 16 bits."""

    def ms(self, rates: Rates) -> float:
        """Reading or multiplying, whichever takes longer: the other is hidden behind it."""
        products = rates.get(f"{self.operands}_tflop_s", rates["gemm_tflop_s"])
        return max(self.read_bytes / rates["read_gb_s"] / 1e6, self.flops / products / 1e9)


@dataclass(frozen=True, slots=True)
class Bars:
    """What a time is compared with, in its unit."""

    limit: float | None = None
    """By the rates that were measured in the same run."""
    floor: float | None = None
    """By the card's data sheet."""

    def times(self, factor: float) -> Bars:
        """In another unit, or of a part."""
        return Bars(*(None if bar is None else bar * factor for bar in (self.limit, self.floor)))


def sheet_rates(card: str) -> dict[str, float]:
    """The rates of a card's data sheet, empty if it has none. ``card``: as in :data:`DATA_SHEETS`, on the right."""
    if not card:
        return {}
    from engine_lab.shared.estimates.devices import sheet

    figures = sheet(card).figures
    named = {
        "read_gb_s": "bandwidth_gb_s", "copy_gb_s": "bandwidth_gb_s", "gemm_tflop_s": "bf16_tflops",
        "fp8_tflop_s": "fp8_tflops", "int8_tflop_s": "int8_tflops",
    }  # fmt: skip
    return {name: figures[figure] for name, figure in named.items() if figure in figures}


def decode(
    shape: Shape, batch: int, context: int, *, weight: float, head: float | None = None, kv: float | None = None
) -> Work:
    """A decode step: every weight once, and the keys and values of each row's context. ``weight``, ``head``, ``kv``:
    bytes each of them takes, those of a weight where not given."""
    keys = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * context
    body, lm_head = weight * shape.body, (weight if head is None else head) * shape.head
    return Work(body + lm_head + (weight if kv is None else kv) * batch * keys)


def prefill(shape: Shape, tokens: int, weight: float) -> Work:
    """A whole prompt: the products of every token, causal attention, the head for one row; every weight is read.
    ``weight``: its bytes."""
    pairs = tokens * (tokens + 1) / 2
    attention = 4.0 * pairs * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    flops = 2.0 * shape.body * tokens + attention + 2.0 * shape.head
    return Work(weight * (shape.body + shape.head), flops)


def drafting(head: HeadShape, drafts: int, weight: float) -> Work:
    """Draft KV sync and so many drafts: for the first draft all of the head, for each other one all but what takes in
    the model's states; where nothing is drafted, what the layer's keys are made with. Without keys and values."""
    return Work(weight * (head.fc + (drafts * (head.layer + head.lm_head) if drafts else head.qkv)))


def both(first: Work, second: Work) -> Work:
    """One after the other, with the same operands."""
    return Work(first.read_bytes + second.read_bytes, first.flops + second.flops, first.operands)


def attention(case: AttentionCase) -> Work:
    """One layer in 16 bits: the keys that some query sees are read, and values where they are no part of them; of
    prompts, and of 128 heads that share their keys, multiplying takes longer."""
    flops = read = 0.0
    for q_len, kv_len in case.rows:
        seen = min(kv_len, case.window or kv_len)
        pairs = q_len * (seen if case.window else kv_len - (q_len - 1) / 2)
        flops += 2 * pairs * case.num_heads * (case.head_dim + case.op.out_dim)
        keys = min(kv_len, seen + q_len - 1) * case.num_kv_heads * case.head_dim
        read += keys * (2 if case.value_dim is None else 1)
    return Work(2 * read, flops)


def linears(num_bytes: float, num_weights: float, rows: int, operands: str = "bf16") -> Work:
    """Products of so many rows with weights that take ``num_bytes``."""
    return Work(num_bytes, 2.0 * rows * num_weights, operands)
