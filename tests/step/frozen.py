"""A stand-in for CUDA graphs on a CPU that freezes what they freeze: addresses and host values.

What a function asks of torch is noted call by call and made again for a replay, on the same tensors and into the same
memory; Python does not run. Before each replay all memory that belongs to the recording is poisoned: what a replay
reads, it was given or has computed. Whatever a CUDA graph cannot record is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.testing.no_sync import NoSync, Synchronises, as_on_a_gpu

POISON_ID = 1 << 40
"""An index that is in no table."""
_ON_THE_HOST = ("tolist", "numpy", "pin_memory", "data_ptr", "__array__")


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        """Function, arguments, and the results in memory of their own."""
        self.memory: list[Tensor] = []
        """All that the recording has allocated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_memory(t) for t in _tensors((*args, *kwargs.values()))}
        own = [t for t in _tensors((result,)) if _memory(t) not in given]
        writes = _writes(func)
        self.memory += own
        if writes or (own and "empty" not in func.overloadpacket.__name__):  # else a view: it shows what is there
            self.calls.append((func, args, kwargs, own))
        return result


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those in values of a call, most of which are tensors, numbers, or lists of these."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found


@cache
def _writes(func: Any) -> bool:
    """Whether a function of torch changes an argument."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _memory(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return -1  # weights that a library keeps in a form of its own
    return tensor.untyped_storage().data_ptr()


class FrozenGraphs:
    """A :data:`engine.step.graphs.Capture`."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        tape = _Tape()
        with as_on_a_gpu():
            for _ in range(2):
                step()
            with _refusing_the_host(), NoSync(), tape:
                step()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            for tensor in tape.memory:
                poison(tensor)
            for func, args, kwargs, own in tape.calls:
                made = _tensors((func(*args, **kwargs),))
                for kept, new in zip(own, made if own else (), strict=True):
                    kept.copy_(new)

        return replay


class RunAgain:
    """Replays by running again, where nothing may wait: for what :class:`FrozenGraphs` cannot see."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        with as_on_a_gpu():
            step()

        def replay() -> None:
            self.replayed += 1
            with as_on_a_gpu(), NoSync():
                step()

        return replay


def poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(POISON_ID if tensor.dtype == torch.int64 else -1)


@contextmanager
def _refusing_the_host() -> Iterator[None]:
    """What reaches into a CPU tensor without torch's dispatcher, as a GPU's would have to be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _ON_THE_HOST:
            patch.setattr(Tensor, name, _refuse(name))
        yield


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Synchronises(name)

    return refused
