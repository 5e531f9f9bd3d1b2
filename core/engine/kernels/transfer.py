"""Between host and device without waiting for either.

Host memory of a copy under way must not change before the copy is done. torch's allocator of pinned memory sees to
that: it hands out a block again only after the event recorded after its last copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Host values as a tensor ``[len(values)]`` on ``device``, in stream order; the host does not wait."""
    host = torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


_COLUMN_BYTES = 16
"""Columns start at multiples of this: kernels are compiled anew for pointers that are aligned less well."""


def upload_columns(
    columns: Sequence[tuple[Sequence[float], torch.dtype]], device: torch.device | str
) -> tuple[Tensor, ...]:
    """Several vectors of different dtypes in one copy, each contiguous; the host does not wait."""
    parts = [torch.tensor(values, dtype=dtype).view(torch.uint8) for values, dtype in columns]
    starts, total = [], 0
    for part in parts:
        starts.append(total)
        total += -(-len(part) // _COLUMN_BYTES) * _COLUMN_BYTES
    on_cuda = torch.device(device).type == "cuda"
    host = torch.empty(total, dtype=torch.uint8, pin_memory=on_cuda)
    for start, part in zip(starts, parts, strict=True):
        host[start : start + len(part)] = part
    there = host.to(device, non_blocking=True)
    return tuple(
        there[start : start + len(part)].view(dtype)
        for start, part, (_, dtype) in zip(starts, parts, columns, strict=True)
    )


def refill(target: Tensor, values: Sequence[int]) -> None:
    """Overwrite a tensor that lives on a device, in stream order; the host does not wait."""
    host = torch.tensor(values, dtype=target.dtype).view_as(target)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tensors on their way to the host."""

    tensors: tuple[Tensor, ...]
    done: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors in host memory, once everything before them in the stream has happened."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensors


def download(tensors: Sequence[Tensor]) -> Arriving:
    """Start to copy ``tensors`` to the host, in stream order: what happens to them afterwards does not matter."""
    if not any(t.is_cuda for t in tensors):
        return Arriving(tuple(t.clone() for t in tensors), None)
    host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return Arriving(host, done)


Mark = float | torch.cuda.Event
"""A moment: on a CPU of the host's clock in seconds, on a GPU of the stream."""


def mark(device: str) -> Mark:
    """Now: on a GPU, when everything before it in the stream has happened."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Milliseconds between two marks of one device, the earlier one first; waits until the later has happened."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "marks of different devices"
        return (end - start) * 1e3
    end.synchronize()  # a step that samples nothing brings nothing to wait for
    return float(start.elapsed_time(end))
