"""Plans for devices that are only stated: they can be sized, not run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.assembly.assemble import configure
from engine.assembly.bind import ENGINE_SLOTS, BoundEngine, build_context, build_slots, describe_model
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.assembly.plan import EnginePlan
from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import DeviceFacts
from engine.contracts.ops import Attention


def stated_plan(overrides: Sequence[str], config_dirs: Sequence[Path], device: DeviceFacts) -> EnginePlan:
    """For a device that is not here. Raises :class:`AssemblyError`."""
    configured = configure(overrides, config_dirs)
    settings = configured.composed.settings
    model = model_config(settings.model.path, settings.model.name)
    return resolve(configured.composed, configured.discovered, model, device)


class _NotHere:
    """Stands in for the attention kernel of a card that is not here: only its dtypes are asked for."""

    capabilities = AttentionCapabilities(None, ("float32", "bfloat16", "float16"), True, True, 0, True)

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        return "not here"

    def prepare(self, batch: AttentionBatch) -> NoReturn:
        raise NotImplementedError("a plan for a device that is only stated cannot run")

    def forward(self, *arguments: object) -> NoReturn:
        raise NotImplementedError("a plan for a device that is only stated cannot run")


def bind_stated(plan: EnginePlan) -> BoundEngine:
    """The plugins of a plan for a device that is only stated: all but the attention kernel, which needs the device.

    Raises :class:`~engine.assembly.errors.AssemblyError`.
    """
    context = build_context(plan)
    slots = tuple(slot for slot in ENGINE_SLOTS if slot not in ("architecture", "attention_kernel"))
    parts = {"attention_kernel": (_NotHere(),), **build_slots(plan, slots, context)}
    return BoundEngine.of(plan, context, describe_model(plan), parts)
