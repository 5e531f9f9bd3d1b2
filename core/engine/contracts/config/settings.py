"""The settings that belong to no slot, and the root of them all."""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field

from engine.contracts.config.batches import BatchSettings
from engine.contracts.config.checks import at_least, one_of
from engine.contracts.config.fleet import FleetSettings
from engine.contracts.config.gateway import GatewaySettings
from engine.contracts.config.server import ServerSettings
from engine.contracts.config.slo import SloSettings


@dataclass(frozen=True)
class ModelSettings:
    path: str = "bundled"
    """``bundled``, a local directory in Hugging Face layout, or a hub id."""
    name: str = ""
    """Name under which the model is served; empty: derived from ``path``."""
    dtype: str = "auto"
    """``auto``, ``float32``, ``bfloat16`` or ``float16``. auto: the checkpoint's, but float32 for the bundled
    model on a CPU."""
    max_len: int | None = None
    """Most tokens per request (prompt + output); null: what the model allows."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.max_len is not None:
            at_least("model.max_len", self.max_len, 2)


@dataclass(frozen=True)
class MemorySettings:
    fraction: float = 0.9
    """Share of the device's free memory the engine may use."""
    kv_tokens: int | None = None
    """Size of the KV pool in tokens; null: from ``fraction``, at most what ``scheduler.max_requests`` can use. Layers
    with a window have fewer, in proportion."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"memory.fraction={self.fraction}: expected a number in (0, 1]")
        if self.kv_tokens is not None:
            at_least("memory.kv_tokens", self.kv_tokens, 16)


@dataclass(frozen=True)
class PluginSettings:
    third_party: bool = True
    """False: only the built-in plugins are loaded."""
    allow: list[str] | None = None
    """Distribution names whose plugins may be loaded besides the built-in ones; null: all installed ones."""
    disable: list[str] = field(default_factory=list)
    """Distribution names whose plugins are not loaded."""


@dataclass(frozen=True)
class Settings:
    """The settings that belong to no slot."""

    model: ModelSettings = field(default_factory=ModelSettings)
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    execution: str = "auto"
    """``auto``, ``eager``, ``compile`` or ``graphs``."""
    overlap: bool = True
    """Plan the next step while the device runs this one."""
    seed: int = 0
    """Seeds of requests that bring none are drawn from this and a running number."""
    threads: int | None = None
    """CPU threads of each rank; null: as ``OMP_NUM_THREADS`` says, or else as many as the CPUs this process may run on,
    shared out to the ranks."""
    calibration: str = "auto"
    """Where measured step costs are kept for the next start: ``auto``: ``~/.cache/engine/step_cost`` (below
    ``$XDG_CACHE_HOME`` where that is set), ``none``, or an absolute path."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    plugins: PluginSettings = field(default_factory=PluginSettings)

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("execution", self.execution, ("auto", "eager", "compile", "graphs"))
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        if self.calibration not in ("auto", "none") and not os.path.isabs(self.calibration):
            raise ValueError(f"calibration={self.calibration}: expected auto, none or an absolute path")
