"""The same command on every rank, as torchrun, Slurm and others start it: the process of rank 0 serves, the others join
it. Which rank a process is, its environment says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.contracts.config import Joining, ParallelismConfig, at_least, between
from engine.contracts.parallelism import TOKEN, LauncherError, StartedWorker, WorkerJob, WorkerStart
from engine.contracts.provider import BuildContext
from engine_plugins.parallelism.listening import LOOPBACK, Listener

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables of torchrun, Slurm, Open MPI and MPICH, in the order in which they are looked for."""
PORT = 29600


@dataclass(frozen=True)
class EnvConfig(ParallelismConfig):
    host: str = ""
    """An address of rank 0's machine; empty: ``MASTER_ADDR``, or the first of Slurm's nodes."""
    port: int = 0
    """Where workers join; 0: the one after ``MASTER_PORT``, or 29600."""
    wait_s: float = 300.0
    """How long ranks are waited for."""

    def __post_init__(self) -> None:
        ParallelismConfig.__post_init__(self)
        between("parallelism.port", self.port, 0, 65535)
        at_least("parallelism.wait_s", self.wait_s, 1)

    def joins(self) -> Joining | None:
        if self.num_ranks == 1:
            return None
        here = Place.of(os.environ, self)
        return None if here.rank == 0 else here.joining(os.environ)


@dataclass(frozen=True, slots=True)
class Place:
    """Of this process among all."""

    rank: int
    local_rank: int
    host: str
    port: int

    @staticmethod
    def of(environment: Mapping[str, str], config: EnvConfig) -> Place:
        """Raises ``ValueError`` for an environment that does not say it, or says something else than the settings."""
        rank, size = _number(environment, RANK), _number(environment, SIZE)
        ranks = config.num_ranks
        if size != ranks:
            raise ValueError(
                f"parallelism=env: {size} processes were started, and {config.sizes} makes {ranks} ranks; start {ranks}"
            )
        if rank >= size:
            raise ValueError(f"parallelism=env: this process is rank {rank} of {size}, expected one below {size}")
        host = config.host or environment.get("MASTER_ADDR", "") or _first_node(environment)
        if not host:
            raise ValueError("parallelism=env: neither MASTER_ADDR nor SLURM_JOB_NODELIST says where rank 0 is; set "
                             "parallelism.host")  # fmt: skip
        port = config.port or _port_after(environment.get("MASTER_PORT")) or PORT
        if host not in LOOPBACK and not environment.get(TOKEN):
            raise ValueError(
                f"parallelism=env: whoever reaches {host}:{port} could join; set the environment variable {TOKEN} to "
                "the same secret for all processes"
            )
        local = next((int(environment[name]) for name in LOCAL_RANK if name in environment), 0)
        return Place(rank, local, host, port)

    def joining(self, environment: Mapping[str, str]) -> Joining:
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        device = visible[self.local_rank % len(visible)] if visible else str(self.local_rank)
        return Joining(f"{self.host}:{self.port}", self.rank, {"CUDA_VISIBLE_DEVICES": device})


class EnvLauncher:
    """See :class:`engine.contracts.parallelism.Launcher`."""

    def __init__(self, config: EnvConfig, context: BuildContext) -> None:
        self._config = config
        self._listener: Listener | None = None

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        try:
            here = Place.of(os.environ, self._config)
        except ValueError as error:
            raise LauncherError(str(error)) from error
        self._listener = Listener(here.host, here.port, os.environ.get(TOKEN, ""))
        what_to_do = "was the same command started for every rank, and does MASTER_ADDR reach this machine?"
        return self._listener.wait(jobs, self._config.wait_s, lambda missing: None, what_to_do)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _number(environment: Mapping[str, str], names: Sequence[str]) -> int:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise ValueError(
        f"parallelism=env: the environment has none of {', '.join(names)}; start every rank with torchrun or srun, or "
        "use parallelism=local"
    )


def _port_after(given: str | None) -> int | None:
    """The port that follows ``MASTER_PORT``."""
    if given is None:
        return None
    if not given.isdigit() or not 0 < int(given) < 65535:
        raise ValueError(f"parallelism=env: MASTER_PORT={given}: expected 1 to 65534; or set parallelism.port")
    return int(given) + 1


def _first_node(environment: Mapping[str, str]) -> str:
    """Of a list as Slurm writes it: ``gpu[03-06,09],login1``."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    found = re.match(r"([^\[,]+)(?:\[([^\-,\]]+))?", listed)
    return "" if found is None else found.group(1) + (found.group(2) or "")
