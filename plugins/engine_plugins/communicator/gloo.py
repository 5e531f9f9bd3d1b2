"""Collectives over TCP by ``torch.distributed``'s gloo: ranks on CPUs of any machines that reach each other.

gloo moves bytes; sums are made here, in rank order. The process's default group is left alone. Its errors do not say
who is missing, so every rank tells rank 0's store now and then how far it is, in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext
from engine_plugins.communicator.beats import VERDICT, Beats
from engine_plugins.communicator.calls import ranks_of
from engine_plugins.communicator.gathering import MESSAGES, Gathering, Ranks
from engine_plugins.communicator.torch_store import c10d, connect, groups_of, meet, reason, serve, until


class GlooCommunicator(Gathering):
    """See :class:`engine.contracts.communicator.Communicator`."""

    capturable = False
    same_bits = True
    one_shot = 64 << 10

    def __init__(self, config: CommunicatorConfig, context: BuildContext) -> None:
        super().__init__()
        self._server: Any = None
        self._beats: Beats | None = None
        self._deadline = 0.0
        self._failure: CommunicatorError | None = None

    def invite(self, world: World) -> str:
        self._server, invitation = serve(world)
        return invitation

    def start(self, world: World, invitation: str) -> None:
        if not world.device.startswith("cpu"):
            raise ValueError(f"communicator=gloo moves tensors of CPUs, this rank's device is {world.device}")
        self._check_failure()
        self._world, deadline = world, time.monotonic() + world.timeout_s
        store = connect(world, invitation, deadline)
        meet(world, store, deadline)
        device = c10d.ProcessGroupGloo.create_device(hostname=world.host)
        for name, ranks in groups_of(world, MESSAGES):
            options = c10d.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, until(deadline)
            own = c10d.PrefixStore(f"{name} {ranks}", store)
            try:
                pg = c10d.ProcessGroupGloo(own, ranks.index(world.rank), len(ranks), options)
            except RuntimeError as error:
                said = f"rank {world.rank} cannot connect to group {name}: {reason(error)}"
                raise CommunicatorError(said) from error
            self._groups[name] = pg
        self._beats = Beats(world, connect(world, invitation, deadline))

    def abort(self, why: str) -> None:
        """gloo's calls cannot be interrupted: the one in hand is left to its deadline."""
        self._failure = self._failure or CommunicatorError(f"stopped: {why}")

    def close(self) -> None:
        if self._beats is not None:
            self._beats.close()
        self._groups.clear()
        self._beats = self._server = self._world = None

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise CommunicatorError(str(self._failure), self._failure.ranks)

    @contextmanager
    def _call(self, call: str, group: str, pair: Ranks | None = None) -> Iterator[tuple[Ranks, Any]]:
        world = self._here
        ranks = pair or ranks_of(world, group)
        self._check_failure()
        assert self._beats is not None
        self._begun += 1
        place = f"{pair[0]} to {pair[1]}" if pair else group
        self._beats.enter(self._begun, place)
        entered_at = time.monotonic()
        self._deadline = entered_at + (1 - VERDICT) * world.timeout_s
        try:
            yield ranks, self._groups[group]
        except CommunicatorError:
            raise
        except RuntimeError as error:
            of_group = "" if pair else f" of group {group}"
            entered = f"rank {world.rank} entered {call}{of_group} (call {self._begun})"
            waited = f"waited {time.monotonic() - entered_at:.1f} s: {reason(error)}"
            self._failure = self._beats.failure(entered, place, ranks, waited)
            raise self._failure from error

    def _left(self) -> timedelta:
        """Until the deadline."""
        return until(self._deadline)

    def _gather(self, pg: Any, given: Tensor, mine: Tensor) -> None:
        options = c10d.distributed_c10d.AllgatherOptions()
        options.timeout = self._left()
        pg._allgather_base(given, mine, options).wait()

    def _exchange(self, pg: Any, given: Tensor, mine: Tensor, sizes: list[int], sent: list[int]) -> None:
        options = c10d.AllToAllOptions()
        options.timeout = self._left()
        pg.alltoall_base(given, mine, sizes, sent, options).wait()

    def _broadcast(self, pg: Any, x: Tensor, index: int) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.timeout = index, self._left()
        pg.broadcast([x], options).wait()

    def _send(self, pg: Any, x: Tensor, to: int) -> None:
        pg.send([x], to, 0).wait(self._left())

    def _recv(self, pg: Any, x: Tensor, source: int) -> None:
        pg.recv([x], source, 0).wait(self._left())
