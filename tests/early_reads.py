"""Whether what a kernel reads before its wait was there by then (see ``wait_for_input``).

A kernel that is launched early may run beside all kernels before it, back to the last one that was launched normally;
that one began after the end of all before it. So what is read before the wait must have been written in front of it,
and by a normal launch, which in turn began after all that read what was there.

.. code-block:: python

    with watch_early_reads() as reads:
        step()
    assert reads.found == []
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .launches import watch_launches

Extent = tuple[int, int]
"""Addresses: from, and up to."""


def calls(node: ast.AST) -> list[ast.Call]:
    return [found for found in ast.walk(node) if isinstance(found, ast.Call)]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "?")


def waits(node: ast.AST) -> bool:
    return any(name_of(call) == "wait_for_input" for call in calls(node))


def before_wait(kernel: ast.FunctionDef) -> list[ast.stmt]:
    """What a kernel does before its wait."""
    which = next((index for index, statement in enumerate(kernel.body) if waits(statement)), None)
    assert which is not None, f"{kernel.name} may be launched early (PDL) and never waits"
    return kernel.body[:which]


ASKED_FOR = {"fetch_tile": ("k_ptr", "v_ptr")}
"""What functions have brought into a cache, and do not read."""


def pointers(statements: list[ast.stmt]) -> set[str]:
    """Parameters that statements may read from."""
    parts = [part for statement in statements for part in ast.walk(statement)]
    types = [part.value for part in parts if isinstance(part, ast.Attribute) and part.attr == "dtype"]
    asked = [
        argument
        for call in parts
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Name) and argument.id in ASKED_FOR.get(name_of(call), ())
    ]
    names = {part.id for part in parts if isinstance(part, ast.Name) and part not in types + asked}
    return {name for name in names if name.endswith("_ptr")}


class EarlyReads:
    """Follows the launches of a step."""

    def __init__(self) -> None:
        self.found: list[str] = []
        """What was read too early."""
        self.read: set[str] = set()
        """``kernel: parameter`` of all that was written in the step and read before a wait."""
        self.names: list[str] = []
        """What was launched, in order: as of :class:`tests.launches.Launches`."""
        self._normal: list[bool] = []
        """Of each launch, whether it starts after the end of those before."""
        self._written: list[tuple[Extent, int, str]] = []
        """By which launch, in order."""

    def of_torch(self, func: Any, args: Any, made: Any) -> None:
        written = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        marked = zip(func._schema.arguments, args, strict=False)
        written += [each for about, each in marked if about.alias_info is not None and about.alias_info.is_write]
        self._note(f"aten.{func.overloadpacket.__name__}", True, written)

    def of_triton(self, kernel: Any, tensors: dict[str, Tensor], run: Callable[[], Any]) -> Any:
        is_normal, name = "PDL" not in kernel.arg_names, kernel.fn.__name__
        if not is_normal:
            for parameter in early_pointers(kernel.fn) & tensors.keys():
                self._check(f"{name}: {parameter}", extent(tensors[parameter]))
        before = {parameter: tensor.clone() for parameter, tensor in tensors.items()}
        result = run()
        changed = [tensor for parameter, tensor in tensors.items() if not is_same(before[parameter], tensor)]
        self._note(name, is_normal, changed)
        return result

    def _check(self, what: str, read: Extent) -> None:
        writers = [(launch, by) for (low, high), launch, by in self._written if low < read[1] and read[0] < high]
        if not writers:
            return
        self.read.add(what)
        launch, by = writers[-1]
        if not self._normal[launch] or not any(self._normal[launch + 1 :]):
            self.found.append(f"{what}, written by {by}")

    def _note(self, name: str, is_normal: bool, written: list[Tensor]) -> None:
        self._written += [(extent(tensor), len(self.names), name) for tensor in written if tensor.numel()]
        self.names.append(name)
        self._normal.append(is_normal)


@cache
def early_pointers(function: Callable[..., Any]) -> frozenset[str]:
    """Parameters that a kernel may read from before it waits."""
    (kernel,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(kernel, ast.FunctionDef)
    return frozenset(pointers(before_wait(kernel)))


def extent(tensor: Tensor) -> Extent:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def is_same(before: Tensor, after: Tensor) -> bool:
    """To the bit: NaN is itself."""
    return torch.equal(before.contiguous().view(torch.uint8), after.contiguous().view(torch.uint8))


@contextmanager
def watch_early_reads() -> Iterator[EarlyReads]:
    """Follow the launches of the ``with`` block. Not for use from several threads, nor nested."""
    reads = EarlyReads()
    with watch_launches(reads):
        yield reads
