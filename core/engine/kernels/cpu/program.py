"""A program: the native calls that a function makes for a fixed number of tokens, as a list that one call into C runs.

A function is written down by running it on values. A :class:`Value` stands where a tensor would, but what is computed
of it is a call added to its program, to be made whenever the program runs. So one description of a layer serves both
ways: of tensors it computes now, of values it writes the program. Functions that take either are annotated with
tensors; of values they may take shapes, dtypes and views, and hand them to what is built on :func:`run`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from engine.native import NativeCall, in_one

SCRATCH_BYTES = 256 * 2**20
"""Of address space: pages nobody has written to take no memory. Many times what 16 tokens of a model need."""
ALIGNMENT = 64
"""Bytes; a cache line."""


class NotNative(Exception):
    """Why a function cannot be a program, in words."""


def scratch_memory() -> Tensor:
    """uint8 ``[SCRATCH_BYTES]`` for the buffers of programs. One program runs at a time and nothing in here outlives a
    run: each begins at the start of it, so all together take what the largest takes."""
    pages = mmap.mmap(-1, SCRATCH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


class PositionTables(Protocol):
    """Tables that programs look up by position: :class:`engine.kernels.cpu.rotation_tables.RotationTables`."""

    @property
    def num_bytes(self) -> int: ...

    def reach(self, length: int) -> None:
        """Have positions up to ``length - 1`` in the tables."""
        ...


class Program:
    """Calls on named buffers. ``str(program)`` has a line for each."""

    def __init__(self, title: str, memory: Tensor, max_len: int) -> None:
        """``memory``: for the buffers; ``max_len``: positions are below it."""
        self.title = title
        self.max_len = max_len
        self.calls: list[NativeCall] = []
        self.results: tuple[Tensor, ...] = ()
        """What it leaves to whoever runs it, until the next program runs."""
        self.buffers: dict[str, Tensor] = {}
        """Inputs in memory of their own and what is computed, which the next layer overwrites."""
        self.rotations: list[PositionTables] = []
        """What it looks up by position."""
        self.num_bytes = 0
        """Of ``memory``."""
        self._memory = memory
        self._next = 0
        self._lines: list[str] = []
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []
        self._make: Callable[[], None] | None = None

    def value(self, name: str, memory: Tensor) -> Any:
        """``memory`` as a value: an input that is filled before each run. A name taken by a tensor elsewhere, or of
        another shape, gets a number."""
        unique, count = name, 1
        while not _same(self.buffers.setdefault(unique, memory), memory):
            count += 1
            unique = f"{name}_{count}"
        self._names[memory.data_ptr()] = unique
        return Value(self, memory)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """The value of a contiguous buffer, which nothing has written yet."""
        start, size = self._next, math.prod(shape) * dtype.itemsize
        if start + size > self._memory.nbytes:
            raise NotNative(f"it takes {start + size} bytes, at most {self._memory.nbytes} are set aside")
        self._next = start + -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = max(self.num_bytes, self._next)
        return self.value(name, self._memory[start : start + size].view(dtype).view(*shape))

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """What is made in here is free again after it: the next layer computes in the same memory."""
        start = self._next
        try:
            yield
        finally:
            self._next = start

    def add(self, call: NativeCall, constants: Sequence[Tensor] = ()) -> None:
        """``constants``: tensors that the call reads or writes; kept as long as the program."""
        self._held += constants
        names = {tensor.data_ptr(): _short(tensor) for tensor in constants} | self._names
        self._lines.append(f"{call.function.name}({', '.join(_argument(a, names) for a in call.arguments)})")
        self.calls.append(call)

    def run(self, longest: int) -> None:
        """Make all calls. ``longest``: one more than the largest position among the inputs."""
        for tables in self.rotations:
            tables.reach(longest)
        if self._make is None:
            self._make = in_one(self.calls)
        self._make()

    def __str__(self) -> str:
        buffers = [f"  {name} {_short(memory)}" for name, memory in self.buffers.items()]
        return "\n".join([f"{self.title}: {len(self.calls)} calls", *buffers, *(f"  {line}" for line in self._lines)])


class Value:
    """A buffer of a program, or a view of one. torch computes nothing of it: that raises :class:`NotNative`."""

    __slots__ = ("memory", "program")

    def __init__(self, program: Program, memory: Tensor) -> None:
        self.program = program
        self.memory = memory

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def view(self, *shape: int) -> Value:
        return Value(self.program, self.memory.view(*shape))

    def __getitem__(self, index: Any) -> Value:
        if not all(isinstance(part, int | slice) for part in (index if isinstance(index, tuple) else (index,))):
            raise NotNative("it indexes a value with something else than slices")
        return Value(self.program, self.memory[index])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotNative(f"it computes with torch: {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> NoReturn:
        raise NotNative(f"it computes with torch: {name}")

    def _computed(self, *others: object) -> NoReturn:
        raise NotNative("it computes with torch: arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __neg__ = _computed


def empty(like: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result: a tensor, or with a value a buffer of this name in its program."""
    if isinstance(like, Value):
        buffer: Tensor = like.program.buffer(name, shape, dtype or like.dtype)
        return buffer
    return like.new_empty(tuple(shape), dtype=dtype)


def run(make: Callable[..., NativeCall], *operands: Any) -> None:
    """Make the call ``make(*operands)``; if one of them is a value, add it to its program instead. ``make`` is always
    given tensors, those of values without meaning yet: it takes pointers, shapes and strides, and writes nothing."""
    call = make(*(operand.memory if isinstance(operand, Value) else operand for operand in operands))
    program = next((operand.program for operand in operands if isinstance(operand, Value)), None)
    if program is None:
        call()
    else:
        program.add(call, [operand for operand in operands if isinstance(operand, Tensor)])


def scratch(x: Tensor) -> AbstractContextManager[None]:
    """:meth:`Program.scratch` of a value's program; nothing for a tensor."""
    return x.program.scratch() if isinstance(x, Value) else nullcontext()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def _short(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _argument(argument: int | None, names: dict[int, str]) -> str:
    """A buffer's name, a number, or ``*`` for a pointer to weights or to a structure."""
    if argument is None:
        return "-"
    return names.get(argument) or (str(int(argument)) if abs(argument) < 1 << 32 else "*")
