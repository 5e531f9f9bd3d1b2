"""Collectives between GPUs by ``torch.distributed``'s NCCL.

NCCL moves bytes; sums are made here, in rank order and float32: NCCL itself rounds at every step, and in an order that
depends on the size. Calls are put on the current CUDA stream and can be captured in CUDA graphs, so they return before
they have run. One that does not come to its end within ``World.timeout_s`` is found by torch's watchdog, which ends
the process: what hangs is a kernel on the GPU, and nothing can be raised out of that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext
from engine.kernels.triton.device import runs_triton
from engine_plugins.communicator.calls import ranks_of
from engine_plugins.communicator.gathering import MESSAGES, Gathering, Ranks
from engine_plugins.communicator.torch_store import c10d, connect, groups_of, meet, reason, serve

OPTIONS: Any = distributed_c10d
"""Of calls; torch exports some of them by this module alone."""


class NcclCommunicator(Gathering):
    """See :class:`engine.contracts.communicator.Communicator`. ``begun`` counts calls of the host: those that are made
    by replaying a graph are not among them."""

    name = "nccl"
    capturable = True
    same_bits = True
    one_shot = 256 << 10

    def __init__(self, config: CommunicatorConfig, context: BuildContext) -> None:
        super().__init__()
        self._server: Any = None
        self._stopped = ""

    def invite(self, world: World) -> str:
        self._server, invitation = serve(world)
        return invitation

    def start(self, world: World, invitation: str) -> None:
        if not world.device.startswith("cuda"):
            raise ValueError(f"communicator={self.name} moves tensors of GPUs, this rank's device is {world.device}")
        self._check()
        self._world = world
        store = self._met(world, invitation)
        for name, ranks in groups_of(world, MESSAGES):
            own = c10d.PrefixStore(f"{name} {ranks}", store)
            self._groups[name] = self._connected(name, ranks, own)

    def _met(self, world: World, invitation: str) -> Any:
        """A store that all ranks have come to."""
        deadline = time.monotonic() + world.timeout_s
        store = connect(world, invitation, deadline)
        meet(world, store, deadline)
        return store

    def _connected(self, name: str, ranks: Ranks, store: Any) -> Any:
        """A process group that has moved its first bytes."""
        world = self._here
        device = torch.device(world.device)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=world.timeout_s)
        try:
            pg = c10d.ProcessGroupNCCL(store, ranks.index(world.rank), len(ranks), options)
            mine = torch.zeros(1, dtype=torch.uint8, device=device)
            self._gather(pg, mine.new_empty(len(ranks)), mine)
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise CommunicatorError(f"rank {world.rank} cannot connect to group {name}: {reason(error)}") from error
        return pg

    def abort(self, why: str) -> None:
        """Has the kernels on the GPU return."""
        self._stopped = self._stopped or why
        for pg in list(self._groups.values()):
            pg.abort()

    def close(self) -> None:
        groups = list(self._groups.values())
        self._groups.clear()
        for pg in groups:
            pg.abort()  # not shutdown, which waits for calls in hand
        self._server = self._world = None

    def _check(self) -> None:
        if self._stopped:
            raise CommunicatorError(f"stopped: {self._stopped}")

    @contextmanager
    def _call(self, call: str, group: str, pair: Ranks | None = None) -> Iterator[tuple[Ranks, Any]]:
        world = self._here
        ranks = pair or ranks_of(world, group)
        self._check()
        self._begun += 1
        try:
            yield ranks, self._groups[group]
        except CommunicatorError:
            raise
        except RuntimeError as error:
            of_group = "" if pair else f" of group {group}"
            entered = f"rank {world.rank} entered {call}{of_group} (call {self._begun})"
            raise CommunicatorError(f"{entered}: {reason(error)}") from error

    def _add_up(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        if not runs_triton(x.device):
            return super()._add_up(parts, x)
        from engine.kernels.triton.sums import sum_in_order  # Triton is imported only where it runs

        return sum_in_order(parts, x)

    def _gather(self, pg: Any, given: Tensor, mine: Tensor) -> None:
        ended(pg._allgather_base(given, mine, _on_this_stream(OPTIONS.AllgatherOptions())))

    def _exchange(self, pg: Any, given: Tensor, mine: Tensor, sizes: list[int], sent: list[int]) -> None:
        ended(pg.alltoall_base(given, mine, sizes, sent, _on_this_stream(OPTIONS.AllToAllOptions())))

    def _broadcast(self, pg: Any, x: Tensor, index: int) -> None:
        options = _on_this_stream(OPTIONS.BroadcastOptions())
        options.rootRank = index
        ended(pg.broadcast([x], options))

    def _send(self, pg: Any, x: Tensor, to: int) -> None:
        ended(pg.send([x], to, 0))

    def _recv(self, pg: Any, x: Tensor, source: int) -> None:
        ended(pg.recv([x], source, 0))


def _on_this_stream(options: Any) -> Any:
    """NCCL puts the call on the current stream: on one of its own, both streams would wait for each other."""
    options.asyncOp = False
    return options


def ended(work: Any) -> None:
    """The current stream waits for a call; ``None``: it was put there."""
    if work is not None:
        work.wait()
