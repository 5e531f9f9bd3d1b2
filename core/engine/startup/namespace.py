"""The namespace of an engine's cached keys and values: what must be equal, beside tokens and tenant, for two engines to
have the same ones.

It is the root of every chain of block keys, so keys of engines with other weights, formats or kernels never meet. How
ranks share out a model is not in it: that decides who holds which part of a block, not what the whole is.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.assembly.plan import EnginePlan, SlotChoice
from engine.contracts.slots import SLOTS
from engine.startup.content_digest import FileState, content_digest
from engine.startup.fingerprint import checkpoint_hash, code_digests, plugin_digests

FORMAT = 1
WITHOUT_EFFECT = ("parallelism", "kv_allocator", "kv_store", "scheduler", "constraint")
"""Slots of the engine process whose plugins do not change keys and values."""
PATH = "path"
"""The setting of a plugin that names a checkpoint of its own."""
SHIPPED = "auto"
"""Its value for one in the model's folder."""


def lasting_namespace(plan: EnginePlan, drafter_path: Path | None = None) -> str:
    """Of keys that outlive this process or reach others: with digests of all weights and of the code. ``drafter_path``:
    the checkpoint of a drafter that does not lie in the model's folder. Raises as
    :func:`~engine.startup.content_digest.content_digest`."""
    drafter = content_digest(drafter_path) if drafter_path is not None else ""
    code = {**code_digests("engine"), **plugin_digests(plan)}
    return _namespace(plan, [content_digest(Path(plan.model.path)), drafter, code])


def passing_namespace(plan: EnginePlan) -> str:
    """Of keys that end with this process, which reads its weights once: their headers stand for them."""
    return _namespace(plan, [checkpoint_hash(plan.model.path), plan.drafter.path])


def identity_of(plan: EnginePlan, namespace: str, files: Sequence[FileState]) -> str:
    """Of an engine whose outputs others may go on with. ``namespace``: a lasting one; empty: ``files``, the state of
    the model's files on this machine before they were read, stands for what is in them."""
    if namespace:
        return namespace
    code = {**code_digests("engine"), **plugin_digests(plan)}
    return _namespace(plan, [files, code])


def _namespace(plan: EnginePlan, contents: list[Any]) -> str:
    """SHA-256 in hexadecimal."""
    model = msgspec.to_builtins(plan.model)
    for name in ("path", "name"):
        del model[name]
    slots = [slot for slot, its in SLOTS.items() if not its.in_api and slot not in WITHOUT_EFFECT]
    parts = {
        "format": FORMAT,
        "engine": plan.engine_version,
        "contents": contents,
        "model": model,
        "plugins": {slot: [_described(choice) for choice in plan.slots.get(slot, ())] for slot in slots},
        "dtype": plan.dtype,
        "device": plan.device.kind,
        "execution": plan.execution,
        "max_len": plan.max_len,
        "byte_order": sys.byteorder,
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def _described(choice: SlotChoice) -> dict[str, Any]:
    config = {name: value for name, value in choice.config.items() if name != PATH}
    return {"name": choice.name, "origin": choice.origin, "config": config}
