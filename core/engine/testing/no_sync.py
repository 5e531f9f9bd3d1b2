"""Refuse whatever makes a host wait for a GPU, or cannot be captured in a CUDA graph. Works on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling import choose

_SIZED_BY_DATA = ("nonzero", "masked_select", "unique", "unique_dim", "_unique2", "bincount")
_READ_BY_THE_HOST = ("_local_scalar_dense", "item", "equal", "is_nonzero", "allclose")
_MADE_FROM_HOST_DATA = ("lift_fresh", "lift_fresh_copy")
_PAST_THE_DISPATCHER = (
    "tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__",
    "__contains__",
)  # fmt: skip
"""Methods that read a CPU tensor without an operation, and wait for a GPU's."""
_REFUSED = frozenset(_SIZED_BY_DATA + _READ_BY_THE_HOST + _MADE_FROM_HOST_DATA)


class Synchronises(AssertionError):
    """An operation on the step path waits for the device, or depends on the host."""


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hooks have no types
    """While active, raises :class:`Synchronises` at an operation whose result the host reads, whose shape depends on
    data, or that copies host values to the device.

    Indexing by a mask counts: its shape depends on data. So do methods by which Python reads a tensor, whether or not
    they are operations on a CPU.
    """

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        for name in _PAST_THE_DISPATCHER:
            self._patches.enter_context(patch.object(torch.Tensor, name, _refusing(name)))
        try:
            return super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._patches.close()
            raise

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        full = f"{name}.{func._overloadname}"
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
        )
        if name in _REFUSED or by_mask:
            raise Synchronises(f"{full}{' by a mask' if by_mask else ''}")
        return func(*args, **(kwargs or {}))


def _refusing(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Synchronises(f"Tensor.{name}")

    return refused


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Sampling that does not ask what is in a tensor, as on a CPU it may."""
    with patch.object(choose, "_may_be_asked", lambda tensor: False):
        yield
