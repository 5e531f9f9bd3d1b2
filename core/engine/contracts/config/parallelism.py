"""What every plugin of the slot ``parallelism`` has in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.contracts.config.checks import at_least
from engine.contracts.config.slots import SlotConfig


@dataclass(frozen=True)
class Joining:
    """How a process becomes the worker of a rank."""

    address: str
    """``HOST:PORT`` of the engine process."""
    rank: int
    environment: Mapping[str, str]
    """Variables to set for it."""


@dataclass(frozen=True)
class ParallelismConfig(SlotConfig):
    tp: int = 1
    """Tensor parallelism: ranks that share out every layer."""
    pp: int = 1
    """Pipeline parallelism: stages that hold some layers each."""
    stage_layers: list[int] | None = None
    """How many layers each stage has; null: so that weights are as equal as can be, the head's included."""
    ep: int = 1
    """Expert parallelism: over how many ranks whole experts are spread; a divisor of ``tp``, or all ``tp * pcp`` ranks
    of a stage."""
    dcp: int = 1
    """Decode context parallelism: how many of a stage's ``tp`` ranks that hold the same key-value heads cache different
    tokens; divides ``tp``."""
    pcp: int = 1
    """Prefill context parallelism: how many times the ``tp`` ranks of a stage are there, to share out the tokens of
    large steps."""
    pcp_min_tokens: int = 256
    """Tokens of the smallest step that is shared out so; each rank computes smaller ones alone."""
    count_experts: bool = False
    """Count how often each expert is chosen, for ``GET /engine/expert_load``. Not with ``pp`` or ``pcp`` above 1."""
    expert_load: str | None = None
    """What ``GET /engine/expert_load`` answered, as a file: the experts of each layer are dealt to the ``ep`` shares so
    that these are chosen about as often. Read where the engine is started; ranks get the counts with the plan."""
    nodes: int = 1
    """Machines, with as many ranks each."""
    share_devices: bool = False
    """Several ranks may use one GPU, for tests: it is no faster."""
    timeout_s: float = 20.0
    """When a rank has died, or has not got on for so long, every stream has ended in an error event."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dcp", "pcp", "pcp_min_tokens", "nodes"):
            at_least(f"parallelism.{name}", getattr(self, name), 1)
        at_least("parallelism.timeout_s", self.timeout_s, 2)
        check_layout(self.tp, self.ep, self.dcp, self.pcp)
        if self.stage_layers is not None and (
            len(self.stage_layers) != self.pp or min(self.stage_layers, default=0) < 1
        ):
            raise ValueError(
                f"parallelism.stage_layers={self.stage_layers}: expected {self.pp} numbers from 1 on, one for each "
                f"stage of parallelism.pp={self.pp}"
            )
        if self.count_experts and self.pp * self.pcp > 1:
            raise ValueError(
                f"parallelism.count_experts=true {self.sizes}: one rank counts, which has all layers and computes all "
                "tokens; use parallelism.pp=1 and parallelism.pcp=1 to measure"
            )
        if self.expert_load is not None and self.ep == 1:
            raise ValueError(
                f"parallelism.expert_load={self.expert_load}: says which share an expert is on, and parallelism.ep=1; "
                "set parallelism.ep, or leave it out"
            )
        if self.num_ranks % self.nodes:
            ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} of {self.sizes}"
            raise ValueError(
                f"parallelism.nodes={self.nodes}: does not divide the {ranks}; each machine has as many: set "
                "parallelism.pp to a multiple of it"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pcp * self.pp

    @property
    def sizes(self) -> str:
        """What the ranks are for, for messages."""
        pcp = f" parallelism.pcp={self.pcp}" if self.pcp > 1 else ""
        return f"parallelism.tp={self.tp} parallelism.pp={self.pp}{pcp}"

    def requires(self) -> Mapping[str, tuple[str, ...]]:
        return {"communicator": ("several_machines",)} if self.nodes > 1 else {}

    def joins(self) -> Joining | None:
        """Where every rank is started with the same command: how this very process joins the one that serves; ``None``:
        it serves. Raises ``ValueError`` where that cannot be told."""
        return None


def check_layout(tp: int, ep: int, dcp: int, pcp: int) -> None:
    """Raise ``ValueError`` for sizes of a stage that do not go together."""
    if tp % ep and ep != tp * pcp:
        of_all = f" and is not parallelism.tp x pcp={tp * pcp}" if pcp > 1 else ""
        said = f"parallelism.ep={ep}: does not divide parallelism.tp={tp}{of_all}"
        raise ValueError(f"{said}; set parallelism.tp to a multiple of it")
    if dcp > 1 and pcp > 1:
        raise ValueError(
            f"parallelism.pcp={pcp} parallelism.dcp={dcp}: ranks that share out the tokens of a step have the whole "
            "cache; use one of them"
        )
    if tp % dcp:
        raise ValueError(
            f"parallelism.dcp={dcp}: does not divide parallelism.tp={tp}; set parallelism.tp to a multiple of it"
        )
