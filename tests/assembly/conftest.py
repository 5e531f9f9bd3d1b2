"""Made-up plugins, checkpoints and devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine import hookspecs
from engine.assembly.discovery import Discovered, Origin, PluginEntry, discover, installed_entries
from engine.contracts.config import PluginSettings
from engine.contracts.model import DeviceFacts
from engine.contracts.provider import Provider

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


class Loads:
    """An entry point's ``load()``."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self.load = load


@pytest.fixture
def entry() -> Callable[..., PluginEntry]:
    """``entry("dist", engine_drafter=[Provider(...)])``: a plugin whose hooks give these values."""

    def make(dist: str, *, group: str = hookspecs.ENTRY_POINT_GROUP, **hooks: Any) -> PluginEntry:
        module = ModuleType(dist.replace("-", "_"))
        for name, value in hooks.items():
            function = value if callable(value) else (lambda given=value: given)
            setattr(module, name, hookspecs.hookimpl(without_arguments(function)))
        return PluginEntry(Origin(dist, "0.3.0", "main"), group, Loads(lambda: module))

    return make


def without_arguments(function: Callable[[], Any]) -> Callable[[], Any]:
    def hook() -> Any:
        return function()

    return hook


@pytest.fixture
def broken_entry() -> Callable[..., PluginEntry]:
    """An entry point whose import raises."""

    def make(dist: str, error: BaseException, group: str = hookspecs.ENTRY_POINT_GROUP) -> PluginEntry:
        def load() -> ModuleType:
            raise error

        return PluginEntry(Origin(dist, "0.3.0", "main"), group, Loads(load))

    return make


@cache
def own_entries() -> tuple[PluginEntry, ...]:
    return tuple(one for one in installed_entries() if one.origin.dist == "engine")


@pytest.fixture
def with_builtins() -> Callable[..., Discovered]:
    """The built-in plugins and some made-up ones."""

    def make(*entries: PluginEntry, **settings: Any) -> Discovered:
        return discover(PluginSettings(**settings), [*own_entries(), *entries])

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """Writes a ``config.json`` and returns the folder."""

    def make(generation: dict[str, Any] | None = None, **changes: Any) -> str:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return str(folder)

    return make


@pytest.fixture
def cpu() -> DeviceFacts:
    return DeviceFacts("cpu", "test", memory_bytes=1 << 30, features=frozenset({"avx2"}))


@pytest.fixture
def gpu() -> DeviceFacts:
    return DeviceFacts("cuda", "test", (9, 0), 80 << 30)


@pytest.fixture
def provider() -> Callable[..., Provider]:
    def make(name: str = "mine", **fields: Any) -> Provider:
        return Provider(name, "mine:Mine", **fields)

    return make
