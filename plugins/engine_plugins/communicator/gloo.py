"""Collectives over TCP by ``torch.distributed``'s gloo: ranks on CPUs of any machines that reach each other.

gloo moves bytes; sums are made here, in rank order. It knows nothing of the process's default group. Its errors do not
say who is missing, so every rank tells rank 0's store now and then how far it is, in a thread of its own.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as distributed

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext
from engine_plugins.communicator.beats import VERDICT, Beats
from engine_plugins.communicator.calls import (
    check_counts,
    check_parts,
    check_peer,
    check_source,
    check_sum,
    in_rank_order,
    not_come,
    ranks_of,
)

ONE_SHOT = 64 << 10
"""Bytes up to which every rank gets everything and adds up for itself."""
MESSAGES = "messages between two ranks"
"""The group of ``send`` and ``recv``."""


class GlooCommunicator:
    """See :class:`engine.contracts.communicator.Communicator`."""

    capturable = False
    same_bits = True

    def __init__(self, config: CommunicatorConfig, context: BuildContext) -> None:
        self._world: World | None = None
        self._server: Any = None
        self._store: Any = None
        self._groups: dict[str, Any] = {}
        self._beats: Beats | None = None
        self._begun = 0
        self._deadline = 0.0
        self._failure: CommunicatorError | None = None

    @property
    def begun(self) -> int:
        return self._begun

    def invite(self, world: World) -> str:
        listener = socket.create_server((world.host, 0))
        port = listener.getsockname()[1]
        self._server = dist.TCPStore(
            world.host, port, None, True, timedelta(seconds=world.timeout_s),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        return f"{world.host} {port} {secrets.token_hex(16)}"

    def start(self, world: World, invitation: str) -> None:
        if not world.device.startswith("cpu"):
            raise ValueError(f"communicator=gloo moves tensors of CPUs, this rank's device is {world.device}")
        self._check_failure()
        words = invitation.split()
        if len(words) != 3 or not words[1].isdigit():
            raise CommunicatorError(f"{invitation!r} is no invitation of communicator=gloo")
        self._deadline = time.monotonic() + world.timeout_s
        self._world, everyone = world, tuple(range(world.size))
        self._store = self._connect(words)
        self._meet(everyone)
        device = dist.ProcessGroupGloo.create_device(hostname=world.host)
        for name, ranks in (*sorted(world.groups.items()), (MESSAGES, everyone)):
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads = [device], 1
            options._timeout = timedelta(seconds=world.timeout_s)
            store = dist.PrefixStore(f"{name} {ranks}", self._store)
            try:
                self._groups[name] = dist.ProcessGroupGloo(store, ranks.index(world.rank), len(ranks), options)
            except RuntimeError as error:
                said = f"rank {world.rank} cannot connect to group {name}: {reason(error)}"
                raise CommunicatorError(said) from error
        self._beats = Beats(world, self._connect(words))

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        check_sum(x)
        with self._call("all_reduce", group) as (ranks, pg):
            count, flat = len(ranks), x.view(-1)
            if x.nbytes <= ONE_SHOT:
                return x.copy_(in_rank_order(self._gathered(pg, flat, [flat] * count)).view(x.shape))
            shares = list(torch.tensor_split(flat, count))
            index = ranks.index(self._here.rank)
            own = in_rank_order(self._exchanged(pg, shares, [shares[index]] * count)).to(x.dtype)
            return x.copy_(torch.cat(self._gathered(pg, own, shares)).view(x.shape))

    def all_gather(self, x: Tensor, group: str, parts: Sequence[Tensor]) -> None:
        check_parts(parts, ranks_of(self._here, group), "all_gather")
        with self._call("all_gather", group) as (_, pg):
            for part, given in zip(parts, self._gathered(pg, x, parts), strict=True):
                part.copy_(given)

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        check_sum(x)
        check_counts(x, counts, ranks_of(self._here, group))
        with self._call("reduce_scatter", group) as (ranks, pg):
            parts = x.split(list(counts))
            own = parts[ranks.index(self._here.rank)]
            return in_rank_order(self._exchanged(pg, parts, [own] * len(ranks))).to(x.dtype, copy=True)

    def all_to_all(self, parts: Sequence[Tensor], group: str, received: Sequence[Tensor]) -> None:
        ranks = ranks_of(self._here, group)
        check_parts(parts, ranks, "all_to_all")
        check_parts(received, ranks, "all_to_all")
        with self._call("all_to_all", group) as (_, pg):
            for part, given in zip(received, self._exchanged(pg, parts, received), strict=True):
                part.copy_(given)

    def broadcast(self, x: Tensor, group: str, source: int) -> Tensor:
        check_source(source, ranks_of(self._here, group), group)
        with self._call("broadcast", group) as (ranks, pg):
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = ranks.index(source), self._left()
            if x.numel() > 0:
                pg.broadcast([as_bytes(x)], options).wait()
            return x

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self._here, to, "send to")
        with self._call(f"send to rank {to}", MESSAGES, (self._here.rank, to)) as (_, pg):
            if x.numel() > 0:
                pg.send([as_bytes(x)], to, 0).wait(self._left())

    def recv(self, x: Tensor, source: int) -> Tensor:
        check_peer(self._here, source, "recv from")
        with self._call(f"recv from rank {source}", MESSAGES, (source, self._here.rank)) as (_, pg):
            if x.numel() > 0:
                pg.recv([as_bytes(x)], source, 0).wait(self._left())
            return x

    def abort(self, why: str) -> None:
        """gloo's calls cannot be interrupted: the one in hand is left to its deadline."""
        self._failure = self._failure or CommunicatorError(f"stopped: {why}")

    def close(self) -> None:
        if self._beats is not None:
            self._beats.close()
        self._groups.clear()
        self._beats = self._store = self._server = self._world = None

    @property
    def _here(self) -> World:
        if self._world is None:
            raise CommunicatorError("this communicator was not started, or is closed")
        return self._world

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise CommunicatorError(str(self._failure), self._failure.ranks)

    def _connect(self, words: Sequence[str]) -> Any:
        """A client of the store of rank 0."""
        host, port, token = words
        wait = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
        try:
            store = dist.TCPStore(host, int(port), None, False, wait, wait_for_workers=False)
        except RuntimeError as error:
            where = f"rank {self._here.rank} does not reach rank 0 at {host}:{port}"
            raise CommunicatorError(f"{where}: {reason(error)}", [0]) from error
        return dist.PrefixStore(token, store)

    def _meet(self, ranks: Sequence[int]) -> None:
        """Until all ranks have come. Raises :class:`CommunicatorError` naming those that do not."""
        self._store.set(f"here {self._here.rank}", "")
        missing = []
        for rank in ranks:
            try:
                left = max(self._deadline - time.monotonic(), 0.001)
                self._store.wait([f"here {rank}"], timedelta(seconds=left))
            except RuntimeError:
                missing.append(rank)
        if missing:
            raise not_come(self._here, missing)

    @contextmanager
    def _call(
        self, call: str, group: str, pair: tuple[int, int] | None = None
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """The ranks that a call is of, and their process group. ``pair``: sender and receiver of a message."""
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
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def _gathered(self, pg: Any, x: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
        """What all ranks bring, each of the shape and dtype of one of ``shapes``: all as long as the longest on their
        way."""
        longest = max(part.nbytes for part in shapes)
        if longest == 0:
            return [torch.empty_like(part) for part in shapes]
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: x.nbytes] = as_bytes(x)
        given = torch.empty(len(shapes) * longest, dtype=torch.uint8)
        options = distributed.AllgatherOptions()
        options.timeout = self._left()
        pg._allgather_base(given, mine, options).wait()
        return [from_bytes(row[: part.nbytes], part) for row, part in zip(given.split(longest), shapes, strict=True)]

    def _exchanged(self, pg: Any, parts: Sequence[Tensor], shapes: Sequence[Tensor]) -> list[Tensor]:
        """What all ranks have for this one, each of the shape and dtype of one of ``shapes``."""
        sent, sizes = [part.nbytes for part in parts], [part.nbytes for part in shapes]
        given = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.AllToAllOptions()
        options.timeout = self._left()
        pg.alltoall_base(given, torch.cat([as_bytes(part) for part in parts]), sizes, sent, options).wait()
        return [from_bytes(row, part) for row, part in zip(given.split(sizes), shapes, strict=True)]


def as_bytes(x: Tensor) -> Tensor:
    """The same memory."""
    return x.reshape(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def from_bytes(raw: Tensor, shape: Tensor) -> Tensor:
    """Bytes as a tensor like ``shape``."""
    if raw.numel() == 0:
        return torch.empty_like(shape)
    return raw.clone().view(shape.dtype).view(shape.shape)


def reason(error: BaseException) -> str:
    """What gloo says, without file and line and without advice."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return said.partition("] ")[2].partition(". ")[0] if said.startswith("[") else said.partition(". ")[0]
