"""How a plugin offers itself: plain metadata that can be judged without importing the plugin's code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from engine.contracts.config import Settings, SlotConfig
from engine.contracts.embedder import Embedder
from engine.contracts.graph import Graph
from engine.contracts.model import DeviceFacts, ModelFacts

PLUGIN_API: tuple[int, int] = (1, 0)
"""(major, minor) of the plugin interface. The major is also in the entry-point group's name. Until the first
release the interface may change without a new number."""


def always_supported(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Provider:
    """One plugin on offer for one slot.

    ``factory`` is ``"package.module:attribute"`` and is imported only if the plugin is selected. It is called
    once as ``factory(config, context)`` with an instance of ``config`` and a :class:`BuildContext`, and returns
    an object that fulfils the slot's Protocol. An architecture's is called as ``factory(config)``, wherever a model is
    described: what a context says follows from its description.

    ``config`` is a frozen dataclass that derives from the slot's base in :mod:`engine.contracts.config` (``None``:
    that base itself); its fields, types and defaults are the plugin's configuration schema.
    ``api`` is the interface version the plugin was written for: write it as a literal.
    ``provides`` are capabilities others may require of this slot; ``requires`` maps a slot to the capabilities
    its plugin must provide. ``unsupported(model, device)`` returns the reasons why this plugin cannot serve this model
    on this device (empty: it can); it must not import torch. An architecture is asked with a
    :class:`~engine.contracts.model.ModelConfig`. A slot that is ``auto`` asks it; one that states none of
    its own is never chosen so. ``suite`` is ``"package.module:Class"``, the suite of the slot filled in for this
    plugin, which then is what ``engine plugins check`` runs; empty: that fills in the slot's suite itself, from this
    record. ``sources`` is ``"package.module:function"``, called as ``function(config, context)``: the C++ that the
    plugin will load (:class:`engine.native.Source`), so that it is compiled while torch is imported; that module must
    not import torch. What it does not name is compiled when the plugin loads it.
    """

    name: str
    factory: str
    config: type[SlotConfig] | None = None
    api: tuple[int, int] = (1, 0)
    provides: tuple[str, ...] = ()
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsupported: Callable[[ModelFacts, DeviceFacts], tuple[str, ...]] = always_supported
    doc: str = ""
    suite: str = ""
    sources: str = ""


def no_model_found(path: str) -> NoReturn:
    raise ValueError(f"{path}: this context knows no other models")


def no_graph(model: ModelFacts) -> NoReturn:
    raise ValueError(f"{model.path}: this context knows no architecture")


def no_embedder() -> NoReturn:
    raise ValueError("this context has no embedder")


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a factory may know when it builds its plugin; the same value for every slot."""

    model: ModelFacts
    device: DeviceFacts
    dtype: str
    """Resolved compute dtype: ``float32``, ``bfloat16`` or ``float16``."""
    execution: str
    """Resolved way of running a step: ``eager`` (torch ops), ``compile`` (kernels built on this machine: C++ on a CPU,
    Triton on a GPU) or ``graphs`` (these, captured in CUDA graphs)."""
    max_len: int
    """Most tokens (prompt + output) of one request."""
    max_requests: int
    """Rows in the device tables: most requests running at once."""
    block_size: int
    """Tokens per KV block."""
    max_draft_tokens: int
    settings: Settings
    find_model: Callable[[str], Path] = no_model_found
    """The local directory of another checkpoint, for example a drafter's: given as ``model.path`` is. Raises
    ``ValueError`` saying what would help."""
    read_model: Callable[[str], ModelFacts] = no_model_found
    """Its facts, for checkpoints of a whole model that the plan's architecture computes. Raises ``ValueError``."""
    describe: Callable[[ModelFacts], Graph] = no_graph
    """What the plan's architecture records of such a model."""
    embedder: Callable[[], Embedder] = no_embedder
    """Builds the plan's embedder. Plugins of the API process may call it."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, never going back; a simulator has its own."""
