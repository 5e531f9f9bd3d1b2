"""Python functions as the native calls they make: recorded once, made again by one call into C.

A recorded call has its pointers in it, so its memory must stay: what a recorded function allocates lies in an arena
(:mod:`engine.execution.lowering.recordings`). Of torch it may use views and the few functions in :data:`COMPUTED`,
which become native calls; any other work that torch does would be missing when the calls are made again, so such a
function is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine import native
from engine.execution import row_ops
from engine.execution.lowering.recordings import Arena, NotRecorded

READS = {
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "ndimension",
    "nelement", "numel", "size", "stride", "storage_offset",
}  # fmt: skip
"""Of a tensor's form, never of what is in it."""
VIEWS = {
    "__getitem__", "chunk", "contiguous", "detach", "expand", "flatten", "float", "narrow", "reshape", "select",
    "split", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""Nothing is computed as long as the result shares its memory with the argument."""


class Memory(TorchFunctionMode):
    """Where a function allocates while it is recorded.

    It sees the calls that Python makes of torch. (A dispatch mode sees more, and imports torch's compiler: two seconds
    and 80 MiB.)
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.reason: str | None = None
        """What the function did that cannot be made again; ``None``: nothing."""
        self._arena = arena
        self._next = 0
        self._end = 0
        self._lasting = False

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """What is allocated in here is free again behind it: the n-th allocation of every layer is the same memory."""
        mark = self._next
        try:
            yield
        finally:
            self._next = mark

    def kept(self, tensor: Tensor) -> Tensor:
        """A copy, made by a native call, in memory of its own: what a caller may read when others use the arena."""
        self._lasting = True
        copy = tensor.new_empty(tensor.shape)
        self._lasting = False
        if tensor.is_contiguous():
            row_ops.copy(tensor, copy)
        else:
            self.reason = "a result that is not contiguous"
        return copy

    def poison(self) -> None:
        """Overwrite what the function allocated."""
        self._arena.poison(self._end)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if self.reason is not None:
            return result
        name = getattr(func, "__name__", str(func))
        if name == "new_empty":
            return result if self._lasting else self._buffer(result)
        if name in READS or (name in VIEWS and args and _share_memory(args[0], result)):
            return result
        compute = COMPUTED.get(name)
        if compute is not None and args and "out" not in options:
            out = self._buffer(result)
            if compute(args, options, out) and torch.equal(out.view(torch.uint8), result.view(torch.uint8)):
                return out
        self.reason = f"{name} in a recorded function"
        return result

    def _buffer(self, like: Tensor) -> Tensor:
        """Memory of this recording for a contiguous tensor."""
        buffer, self._next = self._arena.take(self._next, like)
        self._end = max(self._end, self._next)
        return buffer


def record(
    function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], memory: Memory
) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """Run a function whose work depends on the contents of ``inputs`` and of tensors that never change.

    Returns its results, and what computes them again, in the same memory, from what is in ``inputs`` then. It may
    change its inputs. Raises :class:`NotRecorded`.
    """
    given = [tensor.clone() for tensor in inputs]
    with native.recording() as recording, memory, memory.scratch():
        results = function()
    reason = memory.reason or recording.reason
    if reason is not None:
        raise NotRecorded(reason)
    replay, expected = recording.replay(), [result.clone() for result in results]
    memory.poison()
    for tensor, value in zip(inputs, given, strict=True):
        tensor.copy_(value)
    replay()
    # Bit for bit: a function may also work where nobody notes it.
    if not all(torch.equal(bits(a), bits(b)) for a, b in zip(results, expected, strict=True)):
        raise NotRecorded("replayed, it computes something else: part of its work is neither torch's nor a native call")
    return results, replay


def bits(tensor: Tensor) -> Tensor:
    """To compare: a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def _share_memory(source: Any, results: Tensor | Sequence[Tensor]) -> bool:
    """Whether all of these are views."""
    found = [results] if isinstance(results, Tensor) else results
    memory = source.untyped_storage().data_ptr()
    return all(result.untyped_storage().data_ptr() == memory for result in found)


# What torch computes, as native calls. Each writes to ``out``, a contiguous tensor of the result's shape and dtype,
# and returns whether it could: what a call works on must be given by position.

Compute = Callable[[Sequence[Any], dict[str, Any], Tensor], bool]


def _embedding(args: Sequence[Any], options: dict[str, Any], out: Tensor) -> bool:
    return len(args) == 2 and _look_up(args[1], args[0], out)


def _getitem(args: Sequence[Any], options: dict[str, Any], out: Tensor) -> bool:
    table, index = args
    return isinstance(index, Tensor) and _look_up(table, index, out)


def _look_up(table: Tensor, index: Tensor, out: Tensor) -> bool:
    plain = index.dtype == torch.int64 and index.dim() == 1 and index.is_contiguous() and table.is_contiguous()
    if plain:
        row_ops.gather(table, index, out)
    return plain


def _cat(args: Sequence[Any], options: dict[str, Any], out: Tensor) -> bool:
    parts, dim = args[0], (args[1] if len(args) > 1 else options.get("dim", 0))
    plain = dim in (-1, 1) and all(p.dim() == 2 and p.stride(1) == 1 and p.dtype == out.dtype for p in parts)
    if plain:
        row_ops.join(parts, out)
    return plain


def _argmax(args: Sequence[Any], options: dict[str, Any], out: Tensor) -> bool:
    x, dim = args[0], (args[1] if len(args) > 1 else options.get("dim"))
    plain = x.dim() == 2 and dim in (-1, 1) and not options.get("keepdim") and x.stride(1) == 1
    plain = plain and len(args) <= 2 and x.dtype in (torch.float32, torch.bfloat16)
    if plain:
        row_ops.argmax(x, out)
    return plain


def _float(args: Sequence[Any], options: dict[str, Any], out: Tensor) -> bool:
    x = args[0]
    plain = bool(x.dtype == torch.bfloat16 and x.is_contiguous())
    if plain:
        row_ops.widen(x, out)
    return plain


COMPUTED: dict[str, Compute] = {
    "embedding": _embedding, "__getitem__": _getitem, "cat": _cat, "argmax": _argmax, "float": _float,
}  # fmt: skip
"""By the names Python calls them by."""
