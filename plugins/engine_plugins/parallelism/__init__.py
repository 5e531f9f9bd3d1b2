"""How weights and work are split over devices."""

from __future__ import annotations

from engine.contracts.parallelism import ENGINES, ENGINES_HERE
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.parallelism.env import EnvConfig
from engine_plugins.parallelism.join import JoinConfig
from engine_plugins.parallelism.ray.config import RayConfig, needs_ray


@hookimpl
def engine_parallelism() -> list[Provider]:
    return [
        Provider(
            "local",
            "engine_plugins.parallelism.local:LocalLauncher",
            provides=(ENGINES_HERE,),
            doc="All ranks on this machine, a process each; nothing is started for one rank.",
        ),
        Provider(
            "join",
            "engine_plugins.parallelism.join:JoinLauncher",
            config=JoinConfig,
            doc="Workers are started by hand, here or elsewhere: engine worker --join HOST:PORT.",
        ),
        Provider(
            "env",
            "engine_plugins.parallelism.env:EnvLauncher",
            config=EnvConfig,
            doc="Every rank is started with the same command, by torchrun, Slurm or MPI.",
        ),
        Provider(
            "ray",
            "engine_plugins.parallelism.ray.launcher:RayLauncher",
            config=RayConfig,
            provides=(ENGINES,),
            unsupported=needs_ray,
            doc="Workers on the machines of a Ray cluster, which are found and started by Ray; whole engines, too.",
        ),
        Provider(
            "threads",
            "engine_plugins.parallelism.threads:ThreadLauncher",
            provides=("one_process",),
            doc="All ranks in one process, a thread each: for tests.",
        ),
    ]
