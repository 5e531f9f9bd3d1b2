"""From a plan to built plugins: plain objects the step loop calls directly. No hydra, no pluggy.

The engine process calls :func:`bind`, the API process :func:`bind_api`; each imports only its own slots' plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar, cast

from engine.assembly import values
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import locate, model_config, of_text
from engine.assembly.plan import EnginePlan, SlotChoice, config_of
from engine.contracts.architecture import Architecture, NestedArchitecture
from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.communicator import Communicator
from engine.contracts.constraint import Constraint
from engine.contracts.drafter import DeviceDrafter, Drafter, HostDrafter
from engine.contracts.embedder import Embedder
from engine.contracts.exporter import Exporter
from engine.contracts.graph import Graph
from engine.contracts.kv_allocator import KVAllocator
from engine.contracts.kv_format import KVFormat
from engine.contracts.kv_store import KVStore
from engine.contracts.model import ModelConfig, ModelFacts
from engine.contracts.parallelism import Launcher
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import (
    Quantizer,
)
from engine.contracts.router import Router, placing
from engine.contracts.scheduler import Scheduler
from engine.contracts.slots import SLOTS
from engine.models.record import facts, recorded
from engine.native import Source
from engine.plugin_guard.calls import contract_error, describe_error, error_line, lacking, named, quote, where
from engine.plugin_guard.values import attribute_problems

T = TypeVar("T")

ENGINE_SLOTS = tuple(name for name, slot in SLOTS.items() if not slot.in_api)


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A plan's architecture, and what it recorded of the plan's model."""

    architecture: Architecture
    graph: Graph


@dataclass(frozen=True, slots=True)
class BoundEngine:
    """The plugins of the engine process, built."""

    plan: EnginePlan
    context: BuildContext
    architecture: Architecture
    parallelism: Launcher
    communicator: Communicator
    quantizer: Quantizer
    kv_format: KVFormat
    kv_allocator: KVAllocator
    attention_kernel: AttentionKernel
    drafter: Drafter
    scheduler: Scheduler
    constraint: Constraint
    graph: Graph
    """The whole model, as ``architecture`` recorded it."""
    others: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Plugins of slots that have no field here, by slot."""

    @property
    def kv_stores(self) -> tuple[KVStore, ...]:
        """In the order of ``plan.slots["kv_store"]``."""
        return self.others.get("kv_store", ())

    @staticmethod
    def of(
        plan: EnginePlan, context: BuildContext, described: DescribedModel, built: Mapping[str, tuple[Any, ...]]
    ) -> BoundEngine:
        """From built plugins by slot; ``described`` has the architecture."""
        known = {each.name for each in fields(BoundEngine)}
        named = {slot: parts[0] for slot, parts in built.items() if slot in known}
        others = {slot: parts for slot, parts in built.items() if slot not in known}
        parts = {**named, "architecture": described.architecture}
        return BoundEngine(plan, context, **parts, graph=described.graph, others=others)


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The plugins of the API process, built. ``exporters`` in the order of ``plan.slots["exporter"]``."""

    router: Router
    exporters: tuple[Exporter, ...]


def describe_model(plan: EnginePlan) -> DescribedModel:
    """Build the plan's architecture and have it record the model. Raises :class:`AssemblyError`, and as
    :func:`engine.models.record.recorded` does."""
    (architecture,) = build_slots(plan, ("architecture",), None)["architecture"]
    return DescribedModel(architecture, recorded(architecture, plan.model))


def bind(plan: EnginePlan, described: DescribedModel | None = None) -> BoundEngine:
    """Import and build the engine's plugins. ``described``: the model, where it is described already.

    Raises :class:`AssemblyError` naming each plugin that fails, and as :func:`describe_model`."""
    context = build_context(plan)
    built = build_slots(plan, tuple(slot for slot in ENGINE_SLOTS if slot != "architecture"), context)
    return BoundEngine.of(plan, context, described or describe_model(plan), built)


def bind_api(plan: EnginePlan) -> ApiParts:
    """Import and build what the API process asks. Raises :class:`AssemblyError` naming each plugin that fails."""
    context = build_context(plan)
    asking = replace(context, embedder=partial(_bind_embedder, plan, context))
    parts = build_slots(plan, ("router", "exporter"), asking)
    return ApiParts(cast(Router, parts["router"][0]), cast(tuple[Exporter, ...], parts["exporter"]))


def _bind_embedder(plan: EnginePlan, context: BuildContext) -> Embedder:
    """Import and build the plugin. Raises :class:`AssemblyError`."""
    return cast(Embedder, build_slots(plan, ("embedder",), context)["embedder"][0])


def bind_constraint(plan: EnginePlan) -> Constraint:
    """Import and build the plugin that refuses grammars, apart from the engine's. Raises :class:`AssemblyError`."""
    return cast(Constraint, build_slots(plan, ("constraint",), build_context(plan))["constraint"][0])


def build_context(plan: EnginePlan) -> BuildContext:
    """What every factory of this plan is told."""
    return BuildContext(
        model=plan.model,
        device=plan.device,
        dtype=plan.dtype,
        execution=plan.execution,
        max_len=plan.max_len,
        max_requests=plan.scheduler.max_requests,
        block_size=plan.block_size,
        max_draft_tokens=plan.drafter.max_width,
        settings=plan.settings,
        find_model=partial(_other, locate),
        read_model=partial(_other, partial(_read_model, plan)),
        describe=partial(_describe, plan),
    )


def facts_by(choice: SlotChoice, config: ModelConfig, problems: list[str]) -> ModelFacts | None:
    """What an architecture plugin says of a model; ``None`` where it cannot, and why is among ``problems``."""
    failed: list[str] = []
    architecture = _build(choice, None, failed)
    problems += failed
    if failed:
        return None
    assert isinstance(architecture, Architecture)
    try:
        return facts(architecture, _part_for_text(architecture, config))
    except ValueError as error:
        why = " ".join(str(error).split())
        problems.append(f"{choice.slot}={choice.name} cannot compute model.path={config.path}: {why}")
    except _ENDS as error:  # a plugin may fail in any way; it is named
        problems.append(f"model.path={config.path}: {describe_error(error, architecture, 'describe')}")
    return None


def _part_for_text(architecture: Architecture, config: ModelConfig) -> ModelConfig:
    """Raises as ``text_config`` and :func:`of_text` do."""
    if not isinstance(architecture, NestedArchitecture):
        return config
    part = architecture.text_config(config.raw)
    if not isinstance(part, Mapping):
        raise contract_error(
            architecture, "text_config", f"returned {quote(part)}, expected the part for text of config.json"
        )
    return of_text(config, part)


def _read_model(plan: EnginePlan, path: str) -> ModelFacts:
    """Facts of another checkpoint of the same family. Raises :class:`AssemblyError`."""
    problems: list[str] = []
    found = facts_by(plan.choice("architecture"), model_config(path), problems)
    if found is None:
        raise AssemblyError(problems)
    return found


def _describe(plan: EnginePlan, model: ModelFacts) -> Graph:
    """Raises :class:`AssemblyError`, and as :func:`recorded`."""
    (architecture,) = build_slots(plan, ("architecture",), None)["architecture"]
    return recorded(architecture, model)


def _other(read: Callable[[str], T], path: str) -> T:
    """Read of another checkpoint than ``model.path``. Raises ``ValueError``."""
    try:
        return read(path)
    except AssemblyError as error:
        raise ValueError(str(error).removeprefix("model.path=")) from error


def build_slots(plan: EnginePlan, slots: tuple[str, ...], context: BuildContext | None) -> dict[str, tuple[Any, ...]]:
    """The built plugins of some slots. Raises :class:`AssemblyError` with every plugin that could not be built."""
    problems: list[str] = []
    parts = {slot: tuple(_build(choice, context, problems) for choice in _choices(plan, slot)) for slot in slots}
    if problems:
        raise AssemblyError(problems)
    return parts


def build_choices(choices: Sequence[SlotChoice], context: BuildContext) -> tuple[Any, ...]:
    """The built plugins. Raises :class:`AssemblyError` with every one that could not be built."""
    problems: list[str] = []
    built = tuple(_build(choice, context, problems) for choice in choices)
    if problems:
        raise AssemblyError(problems)
    return built


def plugin_sources(plan: EnginePlan) -> tuple[Source, ...]:
    """The C++ that the engine's plugins say they will load. Raises :class:`AssemblyError` with every plugin that cannot
    say it."""
    context, problems, found = build_context(plan), list[str](), list[Source]()
    for choice in (choice for slot in ENGINE_SLOTS for choice in plan.slots[slot] if choice.sources):
        try:
            found += values.load(choice.sources)(config_of(choice), context)
        except _ENDS as error:  # a plugin may fail in any way; it is named and start-up stops
            problems.append(f"{choice.who}: {choice.sources} failed: {error_line(error)}{where(error.__traceback__)}")
    if problems:
        raise AssemblyError(problems)
    return tuple(found)


def _choices(plan: EnginePlan, slot: str) -> tuple[SlotChoice, ...]:
    """As they are built: an allocator's blocks are those of all ranks that share out tokens."""
    if slot != "kv_allocator":
        return plan.slots[slot]
    own = {"block_size": plan.block_size}
    return tuple(replace(choice, config={**choice.config, **own}) for choice in plan.slots[slot])


_ENDS = (Exception, SystemExit)
"""What a plugin may raise: a module that ends the process is a plugin that fails."""


def _build(choice: SlotChoice, context: BuildContext | None, problems: list[str]) -> Any:
    try:
        factory = values.load(choice.factory)
    except _ENDS as error:  # importing a plugin may fail in any way; it is named and start-up stops
        problems.append(f"{choice.who} cannot be imported from {choice.factory}: {error_line(error)}")
        return None
    try:
        config = config_of(choice)
        built = factory(config) if choice.slot == "architecture" else factory(config, context)
        if choice.slot == "router":
            built = placing(built)
    except _ENDS as error:  # as above
        problems.append(f"{choice.who} failed to build: {error_line(error)}{where(error.__traceback__)}")
        return None
    return _as_contracted(choice, built, problems)


def _as_contracted(choice: SlotChoice, built: Any, problems: list[str]) -> Any:
    """A plugin whose attributes are those of its contract, and whose calls carry its name."""
    protocol = SLOTS[choice.slot].protocol
    optional = SLOTS[choice.slot].optional
    try:
        if not isinstance(built, protocol):
            problems.append(
                f"{choice.who} built a {type(built).__name__}, which is not a {protocol.__name__}: "
                f"{lacking(built, protocol)}"
            )
            return built
        offered = (protocol, *(also for also in optional if isinstance(built, also)))
        problems += [f"{choice.who}: {problem}" for problem in _placement_problems(built)]
        wrong = [problem for each in offered for problem in attribute_problems(built, each)]
        problems += [f"{choice.who}: {problem}" for problem in dict.fromkeys(wrong)]
        return named(built, choice.who, offered)
    except _ENDS as error:  # a property may fail in any way, and not every class can be derived from
        problems.append(f"{choice.who} cannot be used: {describe_error(error)}")
        return built


def _placement_problems(built: Any) -> Iterator[str]:
    """A drafter is one of two kinds, and says which."""
    kinds = {"host": HostDrafter, "device": DeviceDrafter}
    placement = getattr(built, "placement", None)
    kind = kinds.get(placement) if isinstance(built, Drafter) and isinstance(placement, str) else None
    if kind is not None and not isinstance(built, kind) and built.max_width != 0:
        yield f"placement is {placement!r}, and {lacking(built, kind)}"
