"""Slot ``communicator``: how do ranks exchange tensors?

The core decides where collectives stand and calls them in the same order on every rank of a group, with tensors of the
same shape and dtype. A communicator moves bytes and adds up. It is started only where there is more than one rank.

Every call has a deadline: ``World.timeout_s`` after it was begun it raises :class:`CommunicatorError`, however dead,
stopped or slow the others are. After an error nothing else is asked of a communicator than ``close``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from engine.native import NativeCall


class CommunicatorError(RuntimeError):
    """A call that did not come to its end. ``ranks``: who did not take part, as far as that is known."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class World:
    """Who takes part, as one rank sees it."""

    rank: int
    size: int
    groups: Mapping[str, tuple[int, ...]]
    """The groups this rank is in, by name: their ranks, in rising order. ``world`` has all."""
    device: str
    """A torch device string: where the tensors are."""
    timeout_s: float
    host: str = "127.0.0.1"
    """An address of this machine that the other ranks reach."""


@runtime_checkable
class Communicator(Protocol):
    """The plugin. A group is named as in :attr:`World.groups`; tensors are contiguous and on ``World.device``.

    Calls are made by one thread, ``abort`` and ``begun`` by any.
    """

    capturable: bool
    """Calls may be captured in CUDA graphs."""
    same_bits: bool
    """``all_reduce`` leaves the same bits on all ranks: sums are made in the order of ranks."""

    @property
    def begun(self) -> int:
        """How many calls this rank has begun since ``start``: the number of the call in hand."""
        ...

    def invite(self, world: World) -> str:
        """Called on rank 0 before any ``start``: what the other ranks need to find it, an address for example. The core
        carries it to them."""
        ...

    def start(self, world: World, invitation: str) -> None:
        """Meet the other ranks: all call this at the same time. Raises :class:`CommunicatorError` naming who did not
        come."""
        ...

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        """``x`` becomes the sum of all ranks' ``x``, added in float32 and rounded once; returned. float32, bfloat16 or
        float16."""
        ...

    def all_gather(self, x: Tensor, group: str, parts: Sequence[Tensor]) -> None:
        """``parts[i]`` becomes ``x`` of the ``i``-th rank of the group. Any dtype; shapes may differ, and are those
        of ``parts``."""
        ...

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        """The sum of all ranks' ``x [sum(counts), ...]``, of which the ``i``-th rank gets its ``counts[i]`` rows: new
        memory. Added as by ``all_reduce``."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], group: str, received: Sequence[Tensor]) -> None:
        """``parts[i]`` goes to the ``i``-th rank of the group, and ``received[i]`` becomes what it sent. Any dtype;
        shapes may differ, and either may be empty."""
        ...

    def broadcast(self, x: Tensor, group: str, source: int) -> Tensor:
        """``x`` becomes that of rank ``source`` (its number among all ranks); returned. Any dtype."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """To one rank, which calls ``recv`` with as much. Any dtype; calls between two ranks are met in order. It may
        return before ``x`` has arrived, but not before it may be overwritten."""
        ...

    def recv(self, x: Tensor, source: int) -> Tensor:
        """``x`` becomes what rank ``source`` sent; returned."""
        ...

    def abort(self, why: str) -> None:
        """Have the call in hand, and all later ones, raise :class:`CommunicatorError` soon. From any thread; a
        communicator that cannot interrupt its calls leaves them to their deadline."""
        ...

    def close(self) -> None:
        """Give everything back: memory, sockets, files. Nothing is left behind, however the run ended."""
        ...


@runtime_checkable
class NativeCommunicator(Protocol):
    """What a communicator also has whose sums are native functions, for programs on a CPU (:mod:`engine.native`)."""

    def all_reduce_call(self, x: Tensor, group: str) -> NativeCall:
        """The call that makes of ``x``, in place, what ``all_reduce`` would. Nothing is computed yet. A call that fails
        returns, and so do all that follow, without waiting: :meth:`check` says so."""
        ...

    def check(self) -> None:
        """Raise :class:`CommunicatorError` if a native call has failed."""
        ...
