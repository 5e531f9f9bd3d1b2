"""What is known of an engine and its load: recorded once, diagnosed now or later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.contracts.events import DEFAULT_ENGINE
from engine_lab.doctor.classes import Recorded

SCHEMA = "engine-doctor-evidence/2"
SLOTS = ("parallelism", "quantizer", "kv_format", "kv_allocator", "attention_kernel", "drafter", "scheduler")
"""Whose plugins and settings causes are looked for in, and a shadow has, too."""
Figures = dict[str, float]
"""Of one window, by name: those of :data:`engine_lab.doctor.figures.MEANING`. One that is not known is
not there."""


class Engine(msgspec.Struct, frozen=True):
    """How an engine is set up, from ``/engine/plan``."""

    model: str
    path: str
    """The model's folder."""
    device: str
    kind: str
    """``cpu``, ``cuda``"""
    execution: str
    overlap: bool
    slots: dict[str, str]
    """The plugin of each of :data:`SLOTS`."""
    settings: dict[str, Any]
    """By the name of their override, such as ``scheduler.max_requests``."""
    max_len: int
    kv_tokens: int
    weights_bytes: int
    kv_token_bytes: float = 0.0
    """Keys and values of one token."""
    lowering: list[str] = []
    """Which kernels run the model's layers."""
    id: str = DEFAULT_ENGINE
    replicas: int = 1
    """Engines of its server: they share the machine."""

    def now(self, override: str) -> str | None:
        """The override that says what there is instead of one; ``None`` where that is not known."""
        key = override.partition("=")[0].lstrip("+")
        value = self.slots.get(key, self.settings.get(key))
        return None if value is None else f"{key}={value}"


class Evidence(msgspec.Struct, frozen=True):
    """Consecutive windows of one engine."""

    engine: Engine
    windows: list[Figures]
    schema: str = SCHEMA
    taken: str = ""
    """When, in UTC."""
    requests: list[Recorded] = []
    """Those that ended in the windows, by arrival."""


def engine_of(answer: dict[str, Any]) -> Engine:
    """From what ``/engine/plan`` answers."""
    plan, engine = answer["plan"], answer["engine"]
    slots = {slot: plan["slots"][slot][0] for slot in SLOTS}
    settings = {f"{slot}.{key}": value for slot, choice in slots.items() for key, value in choice["config"].items()}
    settings |= {f"memory.{key}": value for key, value in plan["settings"]["memory"].items()}
    settings |= {f"model.{key}": plan["settings"]["model"][key] for key in ("dtype", "max_len")}
    settings["server.max_queue"] = plan["settings"]["server"]["max_queue"]
    settings |= {key: plan["settings"][key] for key in ("execution", "overlap", "threads")}
    return Engine(
        model=plan["model"]["name"],
        path=plan["model"]["path"],
        device=plan["device"]["name"],
        kind=plan["device"]["kind"],
        execution=plan["execution"],
        overlap=plan["overlap"],
        slots={slot: choice["name"] for slot, choice in slots.items()},
        settings=settings,
        max_len=engine["max_len"],
        kv_tokens=engine["kv_tokens"],
        weights_bytes=engine["weights_bytes"],
        kv_token_bytes=engine["kv_bytes"] / engine["kv_tokens"],
        lowering=engine["lowering"],
        id=answer["id"],
        replicas=plan["settings"]["fleet"]["replicas"],
    )


def read(path: str) -> Evidence:
    """Raises ``ValueError`` if the file is none of :func:`write`."""
    try:
        evidence = msgspec.json.decode(Path(path).read_bytes(), type=Evidence)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"--evidence {path}: expected a file written by engine doctor --record: {error}") from error
    if evidence.schema != SCHEMA:
        raise ValueError(f"--evidence {path}: schema {evidence.schema!r}, expected {SCHEMA!r}")
    if not evidence.windows:
        raise ValueError(f"--evidence {path}: it has no windows; expected a file written by engine doctor --record")
    return evidence


def write(evidence: Evidence, path: str) -> None:
    """Raises ``OSError``."""
    Path(path).write_bytes(msgspec.json.encode(evidence) + b"\n")
