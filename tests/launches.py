"""Count what a piece of code would launch on a device: Triton kernels, and torch ops that compute or copy.

.. code-block:: python

    with count_launches() as launches:
        model.layers[0].steps[0].call(context, x)
    assert launches.names == ["linear_rope_write"]

Works without a GPU: under ``TRITON_INTERPRET=1`` interpreted kernels are counted, and what the interpreter itself does
with torch is not. A torch op counts once although a device may need several kernels for it; views and empty tensors
cost none and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"})
"""Ops that allocate or rename, and launch nothing."""


@dataclass(slots=True)
class Launches:
    """What was launched, in order: names of Triton kernels, and of torch ops as ``aten.add``."""

    names: list[str] = field(default_factory=list)

    def of_torch(self, func: Any, args: Any, made: Any) -> None:
        self.names.append(f"aten.{func.overloadpacket.__name__}")

    def of_triton(self, kernel: Any, tensors: dict[str, Tensor], run: Callable[[], Any]) -> Any:
        self.names.append(kernel.fn.__name__)
        return run()

    @property
    def kernels(self) -> list[str]:
        """Triton kernels."""
        return [name for name in self.names if not name.startswith("aten.")]

    @property
    def torch_ops(self) -> list[str]:
        """torch ops."""
        return [name for name in self.names if name.startswith("aten.")]


class Watcher(Protocol):
    """Is told of launches, in order."""

    def of_torch(self, func: Any, args: Any, made: Any) -> None:
        """An op has computed or copied."""
        ...

    def of_triton(self, kernel: Any, tensors: dict[str, Tensor], run: Callable[[], Any]) -> Any:
        """A kernel is launched with these tensors, by the names of its parameters, by ``run``: call it once and return
        what it does."""
        ...


class _TorchOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hooks have no types
    """Tells of every op that is neither a view nor free, unless a kernel is being interpreted."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher
        self.inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if not self.inside_kernel and name not in FREE and not (_may_be_view(func) and _shares(args, made)):
            self._watcher.of_torch(func, args, made)
        return made


def _may_be_view(func: Any) -> bool:
    """Whether the result may share the memory of an argument that is not written to."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _shares(args: Any, made: Any) -> bool:
    """Whether all that was made lies in the memory of an argument: ``to`` and ``reshape`` may copy."""
    given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
    return all(
        tensor.untyped_storage().data_ptr() in given for tensor in tree_leaves(made) if isinstance(tensor, Tensor)
    )


@contextmanager
def watch_launches(watcher: Watcher) -> Iterator[None]:
    """Tell of the launches of the ``with`` block. Not for use from several threads, nor nested."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    ops = _TorchOps(watcher)

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
            tensors = {name: each for name, each in named.items() if isinstance(each, Tensor)}
            ops.inside_kernel = True
            try:
                return watcher.of_triton(kernel, tensors, lambda: run(kernel, *args, **kwargs))
            finally:
                ops.inside_kernel = False

        return launch

    with (
        patch.object(InterpretedFunction, "run", watched(InterpretedFunction.run)),
        patch.object(JITFunction, "run", watched(JITFunction.run)),
        ops,
    ):
        yield


@contextmanager
def count_launches() -> Iterator[Launches]:
    """Collect the launches of the ``with`` block. Not for use from several threads, nor nested."""
    launches = Launches()
    with watch_launches(launches):
        yield launches
