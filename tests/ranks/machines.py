"""Ray nodes on this machine: each is a machine as far as Ray and the engine can tell."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from tests.ranks.processes import children, command_of

HAS = {"num_cpus": 2, "num_gpus": 2}
"""Of a node. Ray counts GPUs, and does not look for them."""

SAYS_ITS_GPU = """
import os, socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
host, _, port = given["--join"].rpartition(":")
connection = socket.create_connection((host, int(port)))
connection.sendall(f"{os.environ['ENGINE_JOIN_TOKEN']} {given['--rank']}\\n".encode())
connection.sendall(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')};{os.environ['OMP_NUM_THREADS']}".encode())
connection.makefile().readline()  # it is welcome
connection.recv(1)
"""
"""A worker that tells which GPUs and how many threads it has, and ends with its connection."""


class Machines:
    """A Ray cluster of nodes with two CPUs each, the first of which is where engines are started."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        # An address of its own: with 127.0.0.1 Ray's nodes do not find each other.
        self._cluster = Cluster(initialize_head=True, head_node_args={**HAS, "include_dashboard": False})
        self.address: str = self._cluster.address
        ray.init(address=self.address, namespace="tests", log_to_driver=False, logging_level="ERROR")

    def add(self) -> Any:
        return self._cluster.add_node(**HAS)

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def raylets(self) -> list[int]:
        return [self.raylet(node) for node in self._cluster.list_all_nodes()]

    def lose(self, node: Any) -> list[int]:
        """Every process of a node is gone at once, as when its power is cut. Returns those of ranks."""
        raylet = self.raylet(node)
        gone = [raylet, *children(raylet)]
        ranks = [pid for pid in gone if "engine.startup.worker" in command_of(pid)]
        for pid in gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ranks

    def own(self) -> list[int]:
        """Ray's processes: those that this process started, and theirs."""
        engines = [pid for pid in children(os.getpid()) if "engine.cli.main" in command_of(pid)]
        theirs = {child for pid in engines for child in (pid, *children(pid))}
        return [pid for pid in children(os.getpid()) if pid not in theirs]

    @property
    def here(self) -> str:
        """The node that this process is on."""
        return str(self._ray.get_runtime_context().get_node_id())

    def free(self, resource: str) -> float:
        return float(self._ray.available_resources().get(resource, 0))

    def all(self, resource: str) -> float:
        return float(self._ray.cluster_resources().get(resource, 0))

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()
