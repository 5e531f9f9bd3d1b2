"""Settings of ``parallelism=ray``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from engine.contracts.config import ParallelismConfig, at_least, between
from engine.contracts.model import DeviceFacts, ModelFacts

ADDRESS = re.compile(r"[^\s/]+:\d+")
INSTALL = (
    "Ray is not installed; install the extra `ray` on every machine: in a clone, "
    "`pip install -c constraints.txt -e '.[ray]'`"
)


@dataclass(frozen=True)
class RayConfig(ParallelismConfig):
    address: str = "auto"
    """Of the Ray cluster, as ``HOST:PORT``; ``auto``: ``RAY_ADDRESS``, or the cluster that this machine is part of."""
    cpus: int = 0
    """CPUs that every rank takes of Ray's; 0: as many as it has threads, and one for a rank on a GPU."""
    port: int = 0
    """Where workers connect to this machine, for firewalls; 0: a free port."""
    wait_s: float = 300.0
    """How long machines that are busy, or a replacement of one that died, are waited for."""

    def __post_init__(self) -> None:
        ParallelismConfig.__post_init__(self)
        if self.address != "auto" and not ADDRESS.fullmatch(self.address):
            raise ValueError(
                f"parallelism.address={self.address}: expected auto or HOST:PORT, the address that `ray start` prints"
            )
        at_least("parallelism.cpus", self.cpus, 0)
        between("parallelism.port", self.port, 0, 65535)
        at_least("parallelism.wait_s", self.wait_s, 1)


def needs_ray(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    found = find_spec("ray")
    # Ray's own files are in /tmp/ray: whoever starts a server in /tmp sees that folder as a package without code.
    return () if found is not None and found.origin is not None else (INSTALL,)
