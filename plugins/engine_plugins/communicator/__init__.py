"""Communicators: how ranks exchange tensors."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.devices import only_compiling_cpus, only_cpus, only_gpus


@hookimpl
def engine_communicator() -> list[Provider]:
    return [
        Provider(
            "nccl",
            "engine_plugins.communicator.nccl:NcclCommunicator",
            provides=("capturable", "several_machines"),
            unsupported=only_gpus,
            doc="A GPU for each rank, by NCCL.",
        ),
        Provider(
            "symmetric",
            "engine_plugins.communicator.symmetric:SymmetricCommunicator",
            provides=("capturable",),
            unsupported=only_gpus,
            doc="GPUs of one machine: small sums through memory that they share, the rest by NCCL.",
        ),
        Provider(
            "shm",
            "engine_plugins.communicator.shm.communicator:SharedMemoryCommunicator",
            unsupported=only_compiling_cpus,
            doc="Ranks on one machine's CPUs, through memory that they share.",
        ),
        Provider(
            "gloo",
            "engine_plugins.communicator.gloo:GlooCommunicator",
            provides=("several_machines",),
            unsupported=only_cpus,
            doc="Ranks on CPUs of any machines, over TCP.",
        ),
        Provider(
            "simulated",
            "engine_plugins.communicator.simulated:SimulatedCommunicator",
            requires={"parallelism": ("one_process",)},
            doc="All ranks in one process, a thread each: what every other one must equal.",
        ),
    ]
