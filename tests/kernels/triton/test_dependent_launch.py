"""What a kernel that is launched before its predecessor has ended may do until then: see ``wait_for_input``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.kernels.triton
import engine.sampling.triton
import engine_plugins.attention_kernel.triton

FOLDERS = (engine.kernels.triton, engine.sampling.triton, engine_plugins.attention_kernel.triton)
READS_WEIGHTS = frozenset({"first_weights", "LOAD_TILE"})
"""Functions that read what no kernel of a step writes: weights."""
READS_WORK = frozenset({"tile_of"})
"""The list of a step's work, written by a copy before its first kernel."""
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
    }
)
"""Functions that touch no memory."""
OF_WEIGHTS = frozenset({"channel_scale_ptr", "router_ptr"})
"""What may be loaded by ``tl.load`` itself."""


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions that wait, by ``file: name``."""
    for package in FOLDERS:
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and waits(node) and node.name != "wait_for_input":
                    yield f"{path.parent.name}/{path.name}: {node.name}", node


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "?")


def calls(node: ast.AST) -> list[ast.Call]:
    return [found for found in ast.walk(node) if isinstance(found, ast.Call)]


def waits(node: ast.AST) -> bool:
    return any(name_of(call) == "wait_for_input" for call in calls(node))


def early(kernel: ast.FunctionDef) -> list[str]:
    """What a kernel calls before its wait and may not."""
    found = []
    for statement in kernel.body:
        if waits(statement):
            break
        for call in calls(statement):
            name = name_of(call)
            loaded = {part.id for part in ast.walk(call) if isinstance(part, ast.Name)} if name == "load" else set()
            if not (name in READS_WEIGHTS | READS_WORK | ARITHMETIC or loaded & OF_WEIGHTS):
                found.append(f"line {call.lineno}: {name}")
    return found


KERNELS = dict(kernels())


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_starts_its_successor_first_and_reads_weights_alone_before_it_waits(name: str) -> None:
    kernel = KERNELS[name]
    assert early(kernel) == []
    first = next(call for statement in kernel.body for call in calls(statement))
    assert name_of(first) == "start_dependents"


def test_every_kernel_that_is_launched_early_is_looked_at() -> None:
    assert len(KERNELS) >= 24, sorted(KERNELS)


def test_an_input_that_is_read_too_early_is_found() -> None:
    source = "def kernel(x_ptr):\n    start_dependents(PDL)\n    x = tl.load(x_ptr)\n    wait_for_input(PDL)\n"
    (kernel,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    assert early(kernel) == ["line 3: load"]
