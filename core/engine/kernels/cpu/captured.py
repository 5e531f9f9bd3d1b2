"""Functions of few tokens as programs, one for each number of tokens: the target's layers, and what drafters run.

What differs from step to step is copied to fixed inputs before a run: the function's arguments, and where its tokens
are (positions, slots, block tables, lengths of rows).
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.kernels.context import Cache, ForwardBatch, prepared_of
from engine.kernels.cpu.program import NotNative, Program, Value, scratch_memory
from engine.kernels.cpu.row_ops import Metadata, kernels
from engine.kernels.metadata import ForwardMetadata
from engine.kernels.model import LoweredModel
from engine.kernels.settings import MOST_TOKENS

W = TypeVar("W")


class Programs:
    """What all programs of an engine share: memory, and the inputs that say where tokens are."""

    def __init__(self, attention: AttentionKernel, block_size: int, max_len: int, num_groups: int) -> None:
        """``max_len``: tokens in a row of the block tables; ``num_groups``: of the cache."""
        self.max_len = max_len
        self.memory = scratch_memory()
        self.written: list[Program] = []
        self._inputs: list[Tensor] = []
        further, row = (num_groups - 1) * MOST_TOKENS, -(-max_len // block_size)
        positions = self.set_aside(torch.empty(0, dtype=torch.int64))
        slots = self.set_aside(torch.empty(0, dtype=torch.int64), further).view(num_groups, -1)
        q_starts, kv_lens = (self.set_aside(torch.empty(0, dtype=torch.int32), 1) for _ in range(2))
        blocks = self.set_aside(torch.empty(0, row, dtype=torch.int32), further).view(num_groups, -1, row)
        pointers = (tensor.data_ptr() for tensor in self._inputs)
        self.metadata = Metadata(*pointers, row, MOST_TOKENS, num_groups)
        self._metadata = []
        for count in range(1, MOST_TOKENS + 1):  # as many rows as tokens, of which some may have no queries
            lengths, ones = (q_starts[: count + 1], kv_lens[:count]), (1,) * count
            batches = tuple(AttentionBatch(ones, ones, tables[:count], *lengths, block_size) for tables in blocks)
            groups = tuple(slots[:, :count]), batches, prepared_of(attention, batches)
            self._metadata.append(ForwardMetadata(positions[:count], *groups))
        self._uncaptured: dict[str, str] = {}
        self._noted = False

    def set_aside(self, like: Tensor, more: int = 0) -> Tensor:
        """Memory for an input of :data:`MOST_TOKENS` and ``more`` rows like those of ``like``."""
        self._inputs.append(like.new_zeros(MOST_TOKENS + more, *like.shape[1:]))
        return self._inputs[-1]

    def begin(self, title: str, count: int) -> tuple[Program, ForwardMetadata]:
        """A program for ``count`` tokens, and where they are, as values."""
        program, metadata = Program(f"{title}, {count} tokens", self.memory, self.max_len), self._metadata[count - 1]
        self.written.append(program)
        positions = program.value("positions", metadata.positions)
        slots = tuple(program.value("slots", mapping) for mapping in metadata.slot_mappings)
        return program, replace(metadata, positions=positions, slot_mappings=slots)

    def write_all(
        self, name: str, write: Callable[[int], W], refusals: type[Exception] | tuple[type[Exception], ...] = NotNative
    ) -> list[W]:
        """What ``write`` makes for each number of tokens, up to the first for which it raises one of ``refusals``: such
        a step runs op by op."""
        found: list[W] = []
        try:
            for count in range(1, MOST_TOKENS + 1):
                found.append(write(count))
        except refusals as why:
            what = f"{name} of {len(found) + 1} or more tokens" if found else name
            reason = str(why) if isinstance(why, NotNative) else f"{type(why).__name__}: {why}"
            self._uncaptured.setdefault(what, f"{what} runs uncaptured (slower): {reason}")
            if self._noted:
                warnings.warn(self._uncaptured[what], stacklevel=2)
        return found

    def fill(self, metadata: ForwardMetadata) -> None:
        """Copy where tokens are to the inputs."""
        assert len(metadata.attention) == self.metadata.groups
        positions = metadata.positions.contiguous()
        for group, (batch, mapping) in enumerate(zip(metadata.attention, metadata.slot_mappings, strict=True)):
            tables, slots = batch.block_tables, mapping.contiguous()
            assert tables.stride(1) == 1 and batch.q_starts.is_contiguous() and batch.kv_lens_device.is_contiguous()
            kernels().fill_metadata(
                ctypes.addressof(self.metadata), group, positions.shape[0], len(batch.q_lens), positions.data_ptr(),
                slots.data_ptr(), batch.q_starts.data_ptr(), batch.kv_lens_device.data_ptr(), tables.data_ptr(),
                tables.shape[1], tables.stride(0),
            )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """What all programs take now, beside their lists of calls."""
        rotations = {id(tables): tables.num_bytes for program in self.written for tables in program.rotations}
        shared = max((program.num_bytes for program in self.written), default=0)
        return shared + sum(rotations.values()) + sum(tensor.nbytes for tensor in self._inputs)

    def notes(self) -> tuple[str, ...]:
        """What runs uncaptured and why, a line each. Whatever is found after this is a warning."""
        self._noted = True
        return tuple(self._uncaptured.values())


class Captured:
    """A function ``(*arguments, metadata=...)`` of ``[num_tokens, ...]`` tensors that returns one, several or ``None``:
    the same function, run as programs where there are any for so many tokens. What it returns is the caller's."""

    def __init__(
        self, name: str, function: Callable[..., Any], programs: Programs, refusals: type[Exception] = NotNative
    ) -> None:
        self._name = name
        self._function = function
        self._programs = programs
        self._refusals = refusals
        self._inputs: list[Tensor] = []
        self._written: list[Program] | None = None
        """By number of tokens, once the shapes of the arguments are known."""

    def write(self, arguments: Sequence[Tensor]) -> None:
        """Write the programs for arguments like these."""
        self._inputs = [self._programs.set_aside(argument) for argument in arguments]
        self._written = self._programs.write_all(self._name, self._write, self._refusals)

    def __call__(self, *arguments: Tensor, metadata: ForwardMetadata) -> Any:
        if isinstance(metadata.positions, Value):  # what calls this is on its way into a program itself
            return self._function(*arguments, metadata=metadata)
        if self._written is None:
            self.write(arguments)
        assert self._written is not None
        count, longest = metadata.positions.shape[0], max(metadata.attention[0].kv_lens, default=0)
        if not 0 < count <= len(self._written) or longest > self._programs.max_len:
            return self._function(*arguments, metadata=metadata)
        for argument, memory in zip(arguments, self._inputs, strict=True):
            move(argument, memory)
        self._programs.fill(metadata)
        program = self._written[count - 1]
        program.run(longest)
        results = tuple(result.clone() for result in program.results)
        return results if len(results) > 1 else results[0] if results else None

    def _write(self, count: int) -> Program:
        program, metadata = self._programs.begin(self._name, count)
        arguments = [program.value(f"argument_{i}", memory[:count]) for i, memory in enumerate(self._inputs)]
        returned = self._function(*arguments, metadata=metadata)
        program.results = memory_of(returned if isinstance(returned, tuple) else (returned,) * (returned is not None))
        return program


def memory_of(values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Where a program leaves them. Raises :class:`NotNative` for what is no value."""
    if not all(isinstance(value, Value) for value in values):
        raise NotNative("it returns what it did not compute from its arguments")
    return tuple(value.memory for value in values)


def move(source: Tensor, memory: Tensor) -> None:
    """Copy to the first rows of an input."""
    assert source.dtype == memory.dtype and source.shape[1:] == memory.shape[1:], (source.shape, memory.shape)
    whole = source.contiguous()
    ctypes.memmove(memory.data_ptr(), whole.data_ptr(), whole.nbytes)


class CapturedSteps:
    """Steps of a model on a cache, with the hidden states wanted of each."""

    def __init__(self, model: LoweredModel, kv: Cache, max_len: int, aux_layers: Sequence[int]) -> None:
        self.programs = Programs(model.attention, kv.block_size, max_len, kv.num_groups)
        self._model, self._kv, self._aux_layers = model, kv, tuple(aux_layers)
        self._step = Captured("a step", self._run, self.programs)
        received = [torch.empty(0, model.graph.sizes[number], dtype=model.dtype) for number in model.graph.received]
        self._step.write(received or [torch.empty(0, dtype=torch.int64)])

    def __call__(
        self, batch: ForwardBatch, kv: Cache, aux_layers: Sequence[int], received: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]] | None:
        """As :meth:`LoweredModel.forward`, or ``None`` for a step that has to run op by op."""
        if kv is not self._kv or tuple(aux_layers) != self._aux_layers:
            return None
        metadata = ForwardMetadata(batch.positions, batch.slot_mappings, batch.attention)
        found = self._step(*(received or (batch.token_ids,)), metadata=metadata)
        return (found[0], list(found[1:])) if isinstance(found, tuple) else (found, [])

    def _run(self, *entering: Tensor, metadata: ForwardMetadata) -> Any:
        prepared = metadata.prepared or prepared_of(self._model.attention, metadata.attention)
        slots = metadata.slot_mappings
        batch = ForwardBatch(entering[0], metadata.positions, slots, metadata.attention, slots[0])
        residual, aux = self._model.run(batch, self._kv, prepared, self._aux_layers, entering)
        return (residual, *aux) if aux else residual


def capture_steps(model: LoweredModel, kv: Cache, max_len: int, aux_layers: Sequence[int] = ()) -> LoweredModel:
    """The model with its steps of few tokens on ``kv`` written as programs, where that is possible. ``max_len``: tokens
    of a request, drafts included; ``aux_layers``: of every step."""
    return replace(model, small_steps=CapturedSteps(model, kv, max_len, aux_layers)) if model.capturable else model
