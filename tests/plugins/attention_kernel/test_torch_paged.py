"""The torch attention kernel: the shared conformance cases, and how it cuts a step into calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.config import SlotConfig
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.testing.attention_kernel import (
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    LogSumExpConformance,
    error,
    make_context,
    make_inputs,
    reference,
    run,
)
from engine.testing.context import build_context
from engine_plugins.attention_kernel.torch_paged import TorchAttention, make_pieces
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat

FULL = Attention(4, 2, 32, 1.0)
NATIVE = NativeFormat(SlotConfig(), build_context())


class TestTorchAttention(LogSumExpConformance):
    capabilities = TorchAttention.capabilities

    def make(self, context: BuildContext) -> AttentionKernel:
        return TorchAttention(SlotConfig(), context)


def batch(rows: list[tuple[int, int]], tables: list[list[int]], block_size: int = 8) -> AttentionBatch:
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    q_lens = tuple(q for q, _ in rows)
    kv_lens = tuple(kv for _, kv in rows)
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0)
    return AttentionBatch(
        q_lens, kv_lens, torch.tensor(padded, dtype=torch.int32), starts, torch.tensor(kv_lens), block_size
    )


@pytest.mark.parametrize("kind", [Int8Format, FP8Format])
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_8_bit_keys_and_values_are_unpacked(case: AttentionCase, kind: type[Int8Format] | type[FP8Format]) -> None:
    kv_format = kind(SlotConfig(), build_context())
    inputs = make_inputs(case, "float32", "cpu", kv_format)
    got = run(TorchAttention(SlotConfig(), build_context()), case, inputs)
    assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]


def test_a_run_of_neighbouring_blocks_is_read_in_place() -> None:
    (piece,) = make_pieces(batch([(1, 21)], [[4, 5, 6]]), FULL, torch.float32, True)
    assert piece.keys == 4 * 8
    assert piece.mask is None


def test_scattered_blocks_are_gathered() -> None:
    (piece,) = make_pieces(batch([(1, 10)], [[4, 2]]), FULL, torch.float32, True)
    assert isinstance(piece.keys, torch.Tensor)
    assert piece.keys.tolist() == [32, 33, 34, 35, 36, 37, 38, 39, 16, 17]


def test_decode_with_a_window_reads_the_window_only() -> None:
    (piece,) = make_pieces(batch([(1, 21)], [[4, 5, 6]]), replace(FULL, window=5), torch.float32, True)
    assert (piece.keys, piece.num_keys) == (4 * 8 + 16, 5)


def test_decode_in_a_chunk_reads_the_chunk_only() -> None:
    (piece,) = make_pieces(batch([(1, 21)], [[4, 5, 6]]), replace(FULL, chunk=9), torch.float32, True)
    assert (piece.keys, piece.num_keys) == (4 * 8 + 18, 3)


def test_a_whole_prompt_needs_no_mask() -> None:
    (piece,) = make_pieces(batch([(40, 40)], [[0, 1, 2, 3, 4]]), FULL, torch.float32, True)
    assert piece.causal and piece.mask is None


def test_rows_share_a_call_until_padding_costs_more_than_another_call() -> None:
    def calls(lengths: list[int]) -> list[tuple[int, int]]:
        tables = [list(range(600 * i, 600 * i + 500)) for i in range(len(lengths))]
        pieces = make_pieces(batch([(1, n) for n in lengths], tables), FULL, torch.float32, True)
        return sorted((piece.rows, piece.num_keys) for piece in pieces)

    assert calls([400, 100, 390, 99, 380]) == [(5, 400)]
    assert calls([3900, 100, 3890, 99]) == [(2, 100), (2, 3900)]


def test_a_step_of_many_rows_in_any_order_equals_the_definition() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for trial in range(6):
        rows = []
        for _ in range(9):
            q_len = max(1, draw(-40, 50))
            rows.append((q_len, q_len + draw(0, 200)))
        case = AttentionCase(f"mix_{trial}", tuple(rows), window=(None, 30)[trial % 2])
        inputs = make_inputs(case, "float32", "cpu")
        got = run(TorchAttention(SlotConfig(), make_context(case, "float32", "cpu")), case, inputs)
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"], rows
