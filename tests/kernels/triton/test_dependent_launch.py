"""What a kernel that is launched before its predecessor has ended may do until then: see ``wait_for_input``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.kernels.triton
import engine.sampling.triton
import engine_plugins.attention_kernel.triton
from tests.early_reads import before_wait, calls, name_of, pointers, waits

FOLDERS = (engine.kernels.triton, engine.sampling.triton, engine_plugins.attention_kernel.triton)
READS = frozenset({"first_weights", "LOAD_TILE", "tile_of", "lengths_of", "key_range"})
"""Functions that read what they are given."""
ARITHMETIC = frozenset(
    {
        "start_dependents",
        "program_id",
        "arange",
        "to",
        "below",
        "paired_rows",
        "pair_columns",
        "where",
        "unpacked",
        "tile_scaled",
        "cdiv",
        "minimum",
        "maximum",
    }
)
"""Functions that touch no memory."""
ASKS = frozenset({"fetch_tile"})
"""Functions that bring into a cache what is read later."""
WEIGHTS = frozenset({"weight_ptr", "scale_ptr", "zero_ptr", "channel_scale_ptr", "bias_ptr", "router_ptr"})
"""What no kernel of a step writes."""
STEP = frozenset({"tiles_ptr", "table_ptr", "q_starts_ptr", "kv_lens_ptr", "ends_ptr"})
"""What is written in front of the first kernel that is launched early: see ``tests/early_reads.py``."""


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions that wait, by ``file: name``."""
    for package in FOLDERS:
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and waits(node) and node.name != "wait_for_input":
                    yield f"{path.parent.name}/{path.name}: {node.name}", node


def early(kernel: ast.FunctionDef) -> list[str]:
    """What a kernel calls, and reads, before its wait and may not."""
    before = before_wait(kernel)
    names = [(call.lineno, name_of(call)) for statement in before for call in calls(statement)]
    found = [f"line {line}: {name}" for line, name in names if name not in READS | ARITHMETIC | ASKS | {"load"}]
    return found + sorted(pointers(before) - WEIGHTS - STEP)


KERNELS = dict(kernels())


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_starts_its_successor_first_and_reads_weights_and_the_step_alone_before_it_waits(name: str) -> None:
    kernel = KERNELS[name]
    assert early(kernel) == []
    first = next(call for statement in kernel.body for call in calls(statement))
    assert name_of(first) == "start_dependents"


def test_every_kernel_that_is_launched_early_is_looked_at() -> None:
    assert len(KERNELS) >= 24, sorted(KERNELS)


def test_an_input_that_is_read_too_early_is_found() -> None:
    source = "def kernel(x_ptr):\n    start_dependents(PDL)\n    x = tl.load(x_ptr)\n    wait_for_input(PDL)\n"
    (kernel,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    assert early(kernel) == ["x_ptr"]
