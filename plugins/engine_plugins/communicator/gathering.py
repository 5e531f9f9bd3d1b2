"""Collectives by those that move bytes alone: what is added up is fetched, and added in rank order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engine.contracts.communicator import CommunicatorError, World
from engine_plugins.communicator.calls import (
    check_counts,
    check_parts,
    check_peer,
    check_source,
    check_sum,
    in_rank_order,
    ranks_of,
)

MESSAGES = "messages between two ranks"
"""The group of ``send`` and ``recv``."""
Ranks = tuple[int, ...]


class Gathering(ABC):
    """A communicator by a process group of ``torch.distributed`` for each group."""

    one_shot: int
    """Bytes of a sum up to which every rank gets everything and adds up for itself."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._groups: dict[str, Any] = {}
        self._begun = 0

    @property
    def begun(self) -> int:
        return self._begun

    @abstractmethod
    def _call(self, call: str, group: str, pair: Ranks | None = None) -> AbstractContextManager[tuple[Ranks, Any]]:
        """In which a call is made: its ranks, and their process group. ``pair``: sender and receiver of a message."""

    @abstractmethod
    def _gather(self, pg: Any, given: Tensor, mine: Tensor) -> None:
        """``mine`` of all ranks one after the other; both of bytes, as many on all ranks."""

    @abstractmethod
    def _exchange(self, pg: Any, given: Tensor, mine: Tensor, sizes: list[int], sent: list[int]) -> None:
        """``sent[i]`` bytes of ``mine`` to the ``i``-th rank, ``sizes[i]`` from it."""

    @abstractmethod
    def _broadcast(self, pg: Any, x: Tensor, index: int) -> None:
        """Bytes of the ``index``-th rank."""

    @abstractmethod
    def _send(self, pg: Any, x: Tensor, to: int) -> None:
        """Bytes to a rank."""

    @abstractmethod
    def _recv(self, pg: Any, x: Tensor, source: int) -> None:
        """Bytes from a rank."""

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        check_sum(x)
        with self._call("all_reduce", group) as (ranks, pg):
            count, flat = len(ranks), x.view(-1)
            if x.nbytes <= self.one_shot:
                return self._add_up(self._gathered(pg, flat, [flat] * count), x)
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
            parts = cut(x, counts)
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
            if x.numel() > 0:
                self._broadcast(pg, as_bytes(x), ranks.index(source))
            return x

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self._here, to, "send to")
        with self._call(f"send to rank {to}", MESSAGES, (self._here.rank, to)) as (_, pg):
            if x.numel() > 0:
                self._send(pg, as_bytes(x), to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        check_peer(self._here, source, "recv from")
        with self._call(f"recv from rank {source}", MESSAGES, (source, self._here.rank)) as (_, pg):
            if x.numel() > 0:
                self._recv(pg, as_bytes(x), source)
            return x

    def _add_up(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """``x``, contiguous, with the sum of as many parts as there are ranks, each of its numbers in a row."""
        return x.copy_(in_rank_order(parts).view(x.shape))

    @property
    def _here(self) -> World:
        if self._world is None:
            raise CommunicatorError("this communicator was not started, or is closed")
        return self._world

    def _gathered(self, pg: Any, x: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
        """What all ranks bring, each of the shape and dtype of one of ``shapes``: all as long as the longest on their
        way."""
        longest = max(part.nbytes for part in shapes)
        if longest == 0:
            return [torch.empty_like(part) for part in shapes]
        mine = as_bytes(x)
        if x.nbytes < longest:
            mine = torch.cat([mine, mine.new_zeros(longest - x.nbytes)])
        given = mine.new_empty(len(shapes) * longest)
        self._gather(pg, given, mine)
        return [
            from_bytes(row[: part.nbytes], part)
            for row, part in zip(cut(given, [longest] * len(shapes)), shapes, strict=True)
        ]

    def _exchanged(self, pg: Any, parts: Sequence[Tensor], shapes: Sequence[Tensor]) -> list[Tensor]:
        """What all ranks have for this one, each of the shape and dtype of one of ``shapes``."""
        sent, sizes = [part.nbytes for part in parts], [part.nbytes for part in shapes]
        mine = torch.cat([as_bytes(part) for part in parts])
        given = mine.new_empty(sum(sizes))
        self._exchange(pg, given, mine, sizes, sent)
        return [from_bytes(row, part) for row, part in zip(cut(given, sizes), shapes, strict=True)]


def cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Rows of ``x``, so many each."""
    parts, first = [], 0
    for size in sizes:
        parts.append(x[first : first + size])
        first += size
    return parts


def as_bytes(x: Tensor) -> Tensor:
    """The same memory."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of strides {list(x.stride())} for {list(x.shape)}: expected a contiguous one")
    return x.view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def from_bytes(raw: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of the shape and dtype of ``like``."""
    if raw.numel() == 0:
        return torch.empty_like(like)
    aligned = raw if raw.storage_offset() % like.element_size() == 0 else raw.clone()
    return aligned.view(like.dtype).view(like.shape)
