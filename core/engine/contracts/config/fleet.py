"""Several engines behind one listener, and how many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.contracts.config.checks import at_least, between

MOST_REPLICAS = 64
Role = Literal["both", "prefill", "decode"]
"""Of an engine: whether it computes prompts for others, decodes what they have computed, or does all by itself."""


@dataclass(frozen=True)
class AutoscaleSettings:
    """More and fewer engines as the load asks for them."""

    min: int = 1
    """Fewest engines. 0: the last one ends where nothing is left to do, and requests wait while one starts again."""
    max: int | None = None
    """Most engines: memory and devices are shared out for so many. null: their number does not change by itself."""
    backlog_s: float = 2.0
    """One more is started where prompts for more than so many seconds of computing wait at each engine, or no row or KV
    block is left,"""
    up_after_s: float = 2.0
    """for so long."""
    down_after_s: float = 120.0
    """One ends where the others would be at most half full without it, for so long."""

    def __post_init__(self) -> None:
        between("fleet.autoscale.min", self.min, 0, MOST_REPLICAS)
        if self.max is None:
            if self.min != 1:
                raise ValueError(f"fleet.autoscale.min={self.min} needs fleet.autoscale.max, the most engines")
        else:
            between("fleet.autoscale.max", self.max, max(1, self.min), MOST_REPLICAS)
        at_least("fleet.autoscale.backlog_s", self.backlog_s, 0.1)
        at_least("fleet.autoscale.up_after_s", self.up_after_s, 0)
        at_least("fleet.autoscale.down_after_s", self.down_after_s, 1)


@dataclass(frozen=True)
class FleetSettings:
    """Several engines behind one listener."""

    replicas: int = 1
    """Engines with this plan, each in a process of its own. They share the CPU cores and the memory of this machine; on
    GPUs each takes the next devices. With ``fleet.autoscale.max`` it is that, of which some are stopped."""
    autoscale: AutoscaleSettings = field(default_factory=AutoscaleSettings)
    launcher: str = "local"
    """Who starts the processes of engines: ``local`` does on this machine. Another plugin of slot ``parallelism`` that
    can, such as ``ray``: each engine runs on a machine that it finds."""
    launch: dict[str, Any] = field(default_factory=dict)
    """Settings of that plugin, by the names that they have there: ``fleet.launch.address``."""
    prefill: int = 0
    """So many of the replicas, the last ones, compute prompts for the others, which read keys and values from them."""
    prefill_tokens: int = 512
    """They are asked for prompts of which more tokens are not expected to be cached."""

    def __post_init__(self) -> None:
        between("fleet.replicas", self.replicas, 1, MOST_REPLICAS)
        most = self.autoscale.max
        if most is not None and self.replicas not in (1, most):
            raise ValueError(
                f"fleet.replicas={self.replicas} and fleet.autoscale.max={most}: leave fleet.replicas out; "
                "fleet.autoscale.min is how many there are at the start"
            )
        object.__setattr__(self, "replicas", most or self.replicas)
        if self.prefill and self.prefill >= self.replicas:
            raise ValueError(
                f"fleet.prefill={self.prefill} of fleet.replicas={self.replicas}: at least one engine has to decode; "
                f"use fleet.replicas={self.prefill + 1} or more"
            )
        at_least("fleet.prefill", self.prefill, 0)
        if self.prefill and most is not None:
            raise ValueError(
                f"fleet.prefill={self.prefill} and fleet.autoscale.max={most}: engines of two kinds are not scaled; "
                "use fleet.replicas"
            )
        at_least("fleet.prefill_tokens", self.prefill_tokens, 1)

    def role(self, replica: int) -> Role:
        """Of the engine with this number, from 0 on."""
        if not self.prefill:
            return "both"
        return "prefill" if replica >= self.replicas - self.prefill else "decode"

    @property
    def at_start(self) -> int | None:
        """Engines that are started with the server: at least one, which shows whether the plan can run; ``None``:
        all."""
        return None if self.autoscale.max is None else max(1, self.autoscale.min)
