"""Functions of few tokens as programs, one for each number of tokens: the target's layers, and what drafters run.

What differs from step to step is copied to fixed inputs before a run: the function's arguments, and where its tokens
are (positions, slots, block tables, lengths of rows).
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.execution.kv_cache import KVCache
from engine.execution.lowering import MOST_TOKENS
from engine.execution.model import ForwardBatch, LoweredModel
from engine.execution.places import Place
from engine.execution.program import Arena, NotNative, Program, Value
from engine.execution.row_ops import Metadata, kernels

W = TypeVar("W")


class Programs:
    """What all programs of an engine share: memory, and the inputs that say where tokens are."""

    def __init__(self, attention: AttentionKernel, block_size: int, max_len: int) -> None:
        """``max_len``: tokens in a row of the block tables."""
        self.arena = Arena()
        self.max_len = max_len
        self.written: list[Program] = []
        self._inputs: list[Tensor] = []
        positions, slots = (self.set_aside(torch.empty(0, dtype=torch.int64)) for _ in range(2))
        q_starts, kv_lens = (self.set_aside(torch.empty(0, dtype=torch.int32), 1) for _ in range(2))
        blocks = self.set_aside(torch.empty(0, -(-max_len // block_size), dtype=torch.int32))
        pointers = (tensor.data_ptr() for tensor in self._inputs)
        self.metadata = Metadata(*pointers, blocks.stride(0))
        self._places = []
        for count in range(1, MOST_TOKENS + 1):  # as many rows as tokens, of which some may have no queries
            rows = blocks[:count], q_starts[: count + 1], kv_lens[:count]
            batch = AttentionBatch((1,) * count, (1,) * count, *rows, block_size)
            self._places.append(Place(positions[:count], slots[:count], batch, attention.stage(batch)))
        self._uncaptured: dict[str, str] = {}
        self._noted = False

    def set_aside(self, like: Tensor, more: int = 0) -> Tensor:
        """Memory for an input of :data:`MOST_TOKENS` and ``more`` rows like those of ``like``."""
        self._inputs.append(like.new_zeros(MOST_TOKENS + more, *like.shape[1:]))
        return self._inputs[-1]

    def begin(self, title: str, count: int) -> tuple[Program, Place]:
        """A program for ``count`` tokens, and where they are, as values."""
        program, place = Program(f"{title}, {count} tokens", self.arena, self.max_len), self._places[count - 1]
        self.written.append(program)
        positions, slots = program.input("positions", place.positions), program.input("slots", place.slot_mapping)
        return program, replace(place, positions=positions, slot_mapping=slots)

    def write_all(self, name: str, write: Callable[[int], W]) -> list[W]:
        """What ``write`` makes for each number of tokens, up to the first for which it raises :class:`NotNative`."""
        found: list[W] = []
        try:
            for count in range(1, MOST_TOKENS + 1):
                found.append(write(count))
        except NotNative as why:
            self._uncaptured.setdefault(f"{name} of {len(found) + 1} or more tokens" if found else name, str(why))
            if self._noted:
                warnings.warn(self.notes()[-1], stacklevel=2)
        return found

    def fill(self, place: Place) -> None:
        """Copy where tokens are to the inputs."""
        batch, tables = place.attention, place.attention.block_tables
        positions, slots = place.positions.contiguous(), place.slot_mapping.contiguous()
        assert tables.stride(1) == 1 and batch.q_starts.is_contiguous() and batch.kv_lens_device.is_contiguous()
        kernels().fill_metadata(
            ctypes.addressof(self.metadata), positions.shape[0], len(batch.q_lens), positions.data_ptr(),
            slots.data_ptr(), batch.q_starts.data_ptr(), batch.kv_lens_device.data_ptr(), tables.data_ptr(),
            tables.shape[1], tables.stride(0),
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """What all programs take now, beside their lists of calls."""
        tables = {id(tables): tables.num_bytes for program in self.written for tables in program.positioned}
        return self.arena.used + sum(tables.values()) + sum(tensor.nbytes for tensor in self._inputs)

    def notes(self) -> tuple[str, ...]:
        """What runs uncaptured and why, a line each. Whatever is found after this is a warning."""
        self._noted = True
        return tuple(f"{name} runs uncaptured (slower): {reason}" for name, reason in self._uncaptured.items())


@dataclass(frozen=True, slots=True)
class Written:
    """A program, and what it leaves to its caller until the next program runs."""

    program: Program
    results: tuple[Tensor, ...]


class CapturedFunction:
    """A function ``(*arguments, place=...) -> results`` of ``[num_tokens, ...]`` tensors, called or run as programs."""

    def __init__(self, name: str, function: Callable[..., Any], programs: Programs) -> None:
        self._name = name
        self._function = function
        self._programs = programs
        self._inputs: list[Tensor] = []
        self._written: list[Written] | None = None
        """By number of tokens, once the shapes of the arguments are known."""

    def write(self, arguments: Sequence[Tensor]) -> None:
        """Write the programs for arguments like these."""
        self._inputs = [self._programs.set_aside(argument) for argument in arguments]
        self._written = self._programs.write_all(self._name, self._write)

    def run(self, arguments: Sequence[Tensor], place: Place) -> tuple[Tensor, ...] | None:
        """The results, which are the caller's; ``None`` where there is no program for so many tokens."""
        if isinstance(place.positions, Value):  # what calls this is on its way into a program itself
            return None
        if self._written is None:
            self.write(arguments)
        assert self._written is not None
        count, longest = place.positions.shape[0], max(place.attention.kv_lens, default=0)
        if not 0 < count <= len(self._written) or longest > self._programs.max_len:
            return None
        for argument, memory in zip(arguments, self._inputs, strict=True):
            move(argument, memory)
        self._programs.fill(place)
        written = self._written[count - 1]
        written.program.run(longest)
        return tuple(result.clone() for result in written.results)

    def _write(self, count: int) -> Written:
        program, place = self._programs.begin(self._name, count)
        arguments = [program.input(f"argument_{i}", memory[:count]) for i, memory in enumerate(self._inputs)]
        return Written(program, results_of(self._function(*arguments, place=place)))


def results_of(returned: Any) -> tuple[Tensor, ...]:
    """Where a function leaves what it returned of values: ``None``, one or a tuple. Raises :class:`NotNative`."""
    results = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    if not all(isinstance(result, Value) for result in results):
        raise NotNative("it returns what it did not compute from its arguments")
    return tuple(result.memory for result in results)


def move(source: Tensor, memory: Tensor) -> None:
    """Copy to the first rows of an input."""
    assert source.dtype == memory.dtype and source.shape[1:] == memory.shape[1:], (source.shape, memory.shape)
    whole = source.contiguous()
    ctypes.memmove(memory.data_ptr(), whole.data_ptr(), whole.nbytes)


class CapturedSteps:
    """Steps of a model on a cache, with the hidden states wanted of each. See
    :class:`engine.execution.model.SmallSteps`."""

    def __init__(self, model: LoweredModel, kv: KVCache, max_len: int, taps: Sequence[int]) -> None:
        self.programs = Programs(model.attention, kv.block_size, max_len)
        self._model, self._kv, self._taps = model, kv, tuple(taps)
        self._step = CapturedFunction("a step", self._run, self.programs)
        self._step.write([torch.empty(0, dtype=torch.int64)])

    def __call__(self, batch: ForwardBatch, kv: KVCache, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]] | None:
        if kv is not self._kv or tuple(taps) != self._taps:
            return None
        found = self._step.run([batch.token_ids], Place(batch.positions, batch.slot_mapping, batch.attention))
        return None if found is None else (found[0], list(found[1:]))

    def _run(self, token_ids: Tensor, place: Place) -> tuple[Tensor, ...]:
        batch = ForwardBatch(token_ids, place.positions, place.slot_mapping, place.attention, place.slot_mapping)
        residual, tapped = self._model.run(batch, self._kv, place.staged, self._taps)
        return (residual, *tapped)


def capture_steps(model: LoweredModel, kv: KVCache, max_len: int, taps: Sequence[int] = ()) -> LoweredModel:
    """The model with its steps of few tokens on ``kv`` written as programs, where that is possible. ``max_len``: tokens
    of a request, drafts included; ``taps``: of every step."""
    return replace(model, small_steps=CapturedSteps(model, kv, max_len, taps)) if model.capturable else model
