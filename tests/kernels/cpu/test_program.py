"""Programs: what is written of values computes what torch computes of tensors; what cannot be written says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import row_ops
from engine.kernels.cpu.program import NotNative, Program, Value, empty, scratch, scratch_memory
from engine.kernels.cpu.rotation_tables import RotationTables
from tests.native import needs_compiler

pytestmark = needs_compiler

TABLE = torch.arange(40, dtype=torch.float32).view(10, 4)
OPS: dict[str, tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]] = {
    "lookup": (lambda i: row_ops.lookup(TABLE, i), [torch.tensor([3, 9, 0])], [torch.tensor([1, 1, 5])]),
    "lookup of numbers": (lambda i: row_ops.lookup(TABLE[:, 1].contiguous().long(), i), [torch.tensor([3])],
                          [torch.tensor([0])]),
    "cat": (lambda a, b: row_ops.cat((a, b, a)), [TABLE[:2], TABLE[4:6, :3]], [TABLE[7:9], TABLE[:2, :3]]),
    "cat with a constant": (lambda a: row_ops.cat((TABLE[:2], a)), [TABLE[4:6]], [TABLE[7:9]]),
    "widen": (row_ops.widen, [torch.randn(2, 33).bfloat16()], [torch.randn(2, 33).bfloat16()]),
    "cloned": (row_ops.cloned, [torch.randn(2, 33)], [torch.randn(2, 33)]),
}  # fmt: skip


def write(function: Callable[..., Any], given: list[Tensor]) -> tuple[Program, list[Tensor], Any]:
    """The program of a function, its inputs and what it returns."""
    program = Program("test", scratch_memory(), 100)
    inputs = [tensor.clone() for tensor in given]
    values = [program.value(f"input_{i}", memory) for i, memory in enumerate(inputs)]
    return program, inputs, function(*values)


@pytest.mark.parametrize("name", OPS)
def test_an_op_of_values_computes_what_it_computes_of_tensors(name: str) -> None:
    function, *batches = OPS[name]
    program, inputs, result = write(function, batches[0])
    assert isinstance(result, Value)
    for batch in batches:
        for memory, value in zip(inputs, batch, strict=True):
            memory.copy_(value)
        program.run(1)
        expected = function(*batch)
        assert torch.equal(result.memory, expected) and result.dtype == expected.dtype


def test_an_index_outside_of_a_table_reads_nothing() -> None:
    program, _, found = write(lambda index: row_ops.lookup(TABLE, index), [torch.tensor([2, -1, 10])])
    program.run(1)
    assert torch.equal(found.memory[0], TABLE[2]) and found.memory[1:].isnan().all()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.softmax(x, dim=-1), "it computes with torch: softmax"),
        (lambda x: torch.cat((x, x)), "it computes with torch: cat"),
        (lambda x: torch.nn.functional.embedding(x, TABLE), "it computes with torch: embedding"),
        (lambda x: x.argmax(dim=-1), "it computes with torch: argmax"),
        (lambda x: 2.0 * x // 3, "it computes with torch: arithmetic"),
        (lambda x: x[torch.tensor([0])], "indexes a value with something else than slices"),
    ],
)
def test_torch_computes_nothing_of_values(function: Callable[[Any], Any], why: str) -> None:
    with pytest.raises(NotNative, match=why):
        write(function, [torch.randn(3, 4)])


def test_a_program_is_printed_with_the_names_of_its_buffers() -> None:
    index = torch.tensor([3])
    program, _, _ = write(lambda i: row_ops.cloned(row_ops.lookup(TABLE, i, "found")), [index])
    assert str(program).splitlines() == [
        "test: 2 calls",
        "  input_0 int64[1]",
        "  found float32[1, 4]",
        "  copy float32[1, 4]",
        "  gather_rows(float32[10, 4], 10, 16, input_0, 1, found)",
        "  copy_rows(1, 16, found, 16, copy, 16)",
    ]


def test_scratch_is_used_again_for_the_next_layer() -> None:
    program = Program("test", scratch_memory(), 1)
    first: Any = program.buffer("first", (10, 1000), torch.float32)
    with scratch(first):
        second: Any = empty(first, "second", (10, 500))
    third: Any = empty(first, "third", (1,))
    assert second.memory.data_ptr() == third.memory.data_ptr() >= first.memory.data_ptr() + first.memory.nbytes
    assert 60_000 <= program.num_bytes < 60_200


def test_more_than_is_set_aside_is_no_program() -> None:
    with pytest.raises(NotNative, match="it takes 1600 bytes, at most 1000"):
        Program("test", torch.empty(1000, dtype=torch.uint8), 1).buffer("large", (100, 4), torch.float32)


def test_rotations_looked_up_are_those_computed() -> None:
    frequencies = torch.rand(16)

    def rotate(positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        angles = (positions[:, None].float() * frequencies)[:, None]
        return ((angles.cos(), angles.sin()),)

    tables = RotationTables(rotate)
    program = Program("test", scratch_memory(), 1000)
    memory = torch.zeros(3, dtype=torch.int64)
    found: Any = tables(program.value("positions", memory))
    for length in (5, 257, 1000):
        memory.copy_(torch.tensor([0, length - 1, length // 2]))
        program.run(length)
        for got, want, computed in zip(found[0], rotate(memory)[0], tables(memory)[0], strict=True):
            assert torch.equal(got.memory, want) and torch.equal(computed, want)
    with pytest.raises(ValueError, match="position 1000, expected less than 1000"):
        program.run(1001)
