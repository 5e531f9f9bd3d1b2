"""What a Ray cluster has against what the ranks need, and which GPU each rank gets. Plain data, no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    alive: bool
    resources: Mapping[str, float]
    """All that it has, in use or not."""

    def holds(self, needed: Mapping[str, float]) -> bool:
        return self.alive and all(self.resources.get(name, 0) >= amount for name, amount in needed.items())


@dataclass(frozen=True, slots=True)
class Wanted:
    """Ranks on several machines, with as many on each."""

    ranks: int
    nodes: int
    each: Mapping[str, float]
    """Resources of one rank, in Ray's names."""

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of the ranks of one machine."""
        return {name: amount * self.ranks_per_node for name, amount in self.each.items()}


def lacking(nodes: Sequence[Node], here: str, wanted: Wanted) -> str:
    """What the cluster lacks; empty: nothing, though others may use it. ``here``: the node that must be among them."""
    if _fits(nodes, here, wanted):
        return ""
    there = ", ".join(_told(node, node.id == here, wanted.each) for node in nodes if node.alive) or "none"
    dead = sum(not node.alive for node in nodes)
    return (
        f"parallelism.nodes={wanted.nodes} with {wanted.ranks_per_node} rank{'s' * (wanted.ranks_per_node > 1)} each "
        f"needs {wanted.nodes} Ray node{'s' * (wanted.nodes > 1)} with {amounts(wanted.bundle)} each, this machine "
        f"among them; Ray has {there}{f' and {dead} that died' * bool(dead)}. {_what_fits(nodes, here, wanted)}"
    )


def lacking_for_engine(nodes: Sequence[Node], needed: Mapping[str, float]) -> str:
    """What the cluster lacks for an engine, which any node may run; empty: nothing, though others may use it."""
    if any(node.holds(needed) for node in nodes):
        return ""
    there = ", ".join(f"{node.address} with {_has(node, needed)}" for node in nodes if node.alive) or "none"
    return (
        f"parallelism=ray: an engine needs a Ray node with {amounts(needed)}; Ray has {there}. Use threads=N or "
        "parallelism.cpus=N, or start Ray on a larger machine with `ray start --address=HOST:PORT`"
    )


def share_of_memory(node: Node, needed: Mapping[str, float]) -> int:
    """Bytes: as much of what Ray found free on a machine when it started there as of its CPUs."""
    return int(node.resources["memory"] * min(1.0, needed[CPU] / node.resources[CPU]))


def devices(own: str, given: Sequence[str]) -> list[str]:
    """The GPUs of the ranks on this machine, of those that Ray gave them: rank 0 keeps the one that it runs on, since
    it ran before Ray was asked. Raises ``ValueError`` if that one is somebody else's."""
    if own not in given:
        raise ValueError(
            f"Ray gave this machine's ranks GPU {', '.join(given)}, and this process runs on GPU {own}, which is "
            f"another job's: start it with CUDA_VISIBLE_DEVICES={given[0]} before"
        )
    rest = list(given)
    rest.remove(own)
    return [own, *rest]


def amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in resources.items())


def _fits(nodes: Sequence[Node], here: str, wanted: Wanted) -> bool:
    able = {node.id for node in nodes if node.holds(wanted.bundle)}
    return here in able and len(able) >= wanted.nodes


def _told(node: Node, here: bool, each: Mapping[str, float]) -> str:
    return f"{node.address}{' (this machine)' * here} with {_has(node, each)}"


def _has(node: Node, each: Mapping[str, float]) -> str:
    return amounts({name: node.resources.get(name, 0) for name in each})


def _what_fits(nodes: Sequence[Node], here: str, wanted: Wanted) -> str:
    ways = []
    for count in range(1, wanted.ranks + 1):
        if wanted.ranks % count == 0 and _fits(nodes, here, Wanted(wanted.ranks, count, wanted.each)):
            ways.append(f"parallelism.nodes={count}")
    for cpus in range(int(wanted.each[CPU]) - 1, 0, -1):
        if _fits(nodes, here, Wanted(wanted.ranks, wanted.nodes, {**wanted.each, CPU: cpus})):
            ways.append(f"parallelism.cpus={cpus}")
            break
    more = "start Ray on more machines with `ray start --address=HOST:PORT`"
    return f"Use {' or '.join(ways)}, or {more}" if ways else f"Use fewer ranks, or {more}"
