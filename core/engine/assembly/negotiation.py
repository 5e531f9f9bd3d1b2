"""Does the selected set fit together, and with this model and device? Pure and total: all problems at once."""

from __future__ import annotations

from engine.assembly import values
from engine.assembly.bind import facts_by
from engine.assembly.choosing import Chosen, choose, choose_architecture, needs_of, others_that_can, plugin_problems
from engine.assembly.compose.selection import Composed
from engine.assembly.discovery import Discovered
from engine.assembly.errors import AssemblyError, listing
from engine.assembly.execution import CAPTURABLE, choose_execution, reasons_against
from engine.assembly.fleet import choose_launcher, fleet_problems
from engine.assembly.model_config import BUNDLED
from engine.assembly.plan import PLAN_VERSION, EnginePlan, SlotChoice
from engine.assembly.records import AUTO
from engine.contracts.attention_kernel import LOG_SUM_EXP
from engine.contracts.config import BLOCK_SIZES, Settings
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.contracts.model import DeviceFacts, ModelConfig, ModelFacts
from engine.contracts.slots import SLOTS
from engine.version import VERSION

HOST_DRAFTER = "host_drafter"
"""Capability of drafters that read tokens on the CPU."""


def resolve(composed: Composed, discovered: Discovered, config: ModelConfig, device: DeviceFacts) -> EnginePlan:
    """The plan, or :class:`AssemblyError` with every reason why there is none."""
    problems: list[str] = []
    architecture = choose_architecture(composed, discovered, config, device, problems)
    # One that does not fit is not asked, and without it nothing can be asked of the others.
    fits = architecture is not None and not problems
    model = _facts(architecture, discovered, config, device, problems) if architecture and fits else None
    if architecture is None or model is None:
        raise AssemblyError([*problems, *plugin_problems(composed, discovered)])
    chosen = [architecture, *choose(composed, discovered, model, device, problems)]
    problems += _capability_problems(chosen, discovered)
    settings = composed.settings
    launcher = choose_launcher(settings, discovered, model, device, problems)
    if launcher is None:
        problems += _parallel_problems(chosen, device)
    problems += _token_problems(chosen, discovered)
    problems += fleet_problems(chosen, settings, device, elsewhere=launcher is not None)
    problems += _setting_problems(settings, model)
    problems += _pool_problems(chosen, settings)
    problems += _execution_problems(chosen, settings, model, device)
    if problems:
        raise AssemblyError(problems)
    dtype = _dtype(settings, model, device)
    execution, execution_notes = choose_execution(settings.execution, device, dtype, *_attention(chosen))
    return EnginePlan(
        version=PLAN_VERSION,
        engine_version=VERSION,
        model=model,
        device=device,
        dtype=dtype,
        max_len=settings.model.max_len or model.max_position,
        execution=execution,
        overlap=settings.overlap,
        settings=settings,
        slots={slot: tuple(slot_choice(one) for one in chosen if one.slot == slot) for slot in SLOTS},
        notes=(*_notes(chosen, settings), *execution_notes),
        launcher=None if launcher is None else slot_choice(launcher),
    )


def _facts(
    architecture: Chosen, discovered: Discovered, config: ModelConfig, device: DeviceFacts, problems: list[str]
) -> ModelFacts | None:
    """What the architecture says of the model; ``None`` where it cannot, and why is among ``problems``."""
    failed: list[str] = []
    model = facts_by(slot_choice(architecture), config, failed)
    if failed:
        can = others_that_can(architecture.offer, discovered, config, device)
        problems += [f"{problem}{can}" for problem in failed]
    return model


def _capability_problems(chosen: list[Chosen], discovered: Discovered) -> list[str]:
    problems = []
    provided = {slot: set[str]() for slot in SLOTS}
    for one in chosen:
        provided[one.slot] |= set(one.offer.provider.provides)
    present = {one.slot: one for one in chosen}
    for one in chosen:
        needs = needs_of(one)
        for slot in dict.fromkeys(need.slot for need in needs):
            lacking = [need.capability for need in needs if need.slot == slot and need.capability not in provided[slot]]
            if not lacking or (slot not in present and not SLOTS[slot].many):
                continue  # nothing chosen there: reported where it was chosen
            have = [o.name for o in discovered.of_slot(slot) if set(lacking) <= set(o.provider.provides)]
            other = present[slot].label if slot in present else f"{slot}=[]"
            problems.append(
                f"{one.label} needs {slot} with {listing(lacking)}, but {other} lacks that; "
                f"{slot} plugins that have it: {listing(have)}"
            )
    return problems


def _parallel_problems(chosen: list[Chosen], device: DeviceFacts) -> list[str]:
    """On GPUs every rank has one of its own."""
    problems = []
    for config in (one.config for one in chosen if one.slot == "parallelism"):
        tp, pp, pcp, nodes = (int(config[name]) for name in ("tp", "pp", "pcp", "nodes"))
        here = tp * pp * pcp // nodes
        if device.kind != "cuda" or here <= device.count or config["share_devices"]:
            continue
        devices = device.count * nodes
        fit = [f"parallelism.tp={n}" for n in range(1, devices + 1) if n * pp * pcp <= devices]
        sizes = f"parallelism.tp={tp} parallelism.pp={pp}" + (f" parallelism.pcp={pcp}" if pcp > 1 else "")
        problems.append(
            f"{sizes}: {here} ranks on this machine need {here} GPUs, and "
            f"{device.count} can be seen (CUDA_VISIBLE_DEVICES?); use {listing(fit) or 'parallelism.pp=1'}, or "
            "parallelism.nodes for GPUs of several machines"
        )
    return problems


def _token_problems(chosen: list[Chosen], discovered: Discovered) -> list[str]:
    """Where ranks share out tokens: of attention that can be merged, and of blocks that are those of all ranks."""
    present, problems = {one.slot: one for one in chosen}, []
    dcp = int(present["parallelism"].config["dcp"]) if "parallelism" in present else 1
    if dcp == 1:
        return []
    kernel, allocator = present.get("attention_kernel"), present.get("kv_allocator")
    if kernel is not None and LOG_SUM_EXP not in kernel.offer.provider.provides:
        can = [o.name for o in discovered.of_slot(kernel.slot) if LOG_SUM_EXP in o.provider.provides]
        problems.append(
            f"parallelism.dcp={dcp} needs attention_kernel with {LOG_SUM_EXP}, but {kernel.label} lacks that; "
            f"attention_kernel plugins that have it: {listing(can)}"
        )
    if allocator is not None and (size := int(allocator.config["block_size"])) * dcp not in BLOCK_SIZES:
        fit = [n for n in BLOCK_SIZES if n * dcp in BLOCK_SIZES]
        sizes = f"kv_allocator.block_size={listing(map(str, fit))}" if fit else "a power of two as parallelism.dcp"
        problems.append(
            f"kv_allocator.block_size={size} parallelism.dcp={dcp}: blocks of {size * dcp} tokens, {size} on each "
            f"rank; expected a power of two up to {BLOCK_SIZES[-1]}: use {sizes}"
        )
    return problems


def _setting_problems(settings: Settings, model: ModelFacts) -> list[str]:
    problems = []
    wanted = settings.model.max_len
    if wanted is not None and wanted > model.max_position:
        why = f" ({model.why_no_longer})" if model.why_no_longer else ""
        problems.append(
            f"model.max_len={wanted}: {model.name} has {model.max_position} positions{why}; "
            f"use model.max_len={model.max_position} or less"
        )
    return problems


def _pool_problems(chosen: list[Chosen], settings: Settings) -> list[str]:
    wanted = settings.memory.kv_tokens
    ranks = max((int(one.config["dcp"]) for one in chosen if one.slot == "parallelism"), default=1)
    sizes = [one.config["block_size"] * ranks for one in chosen if one.slot == "kv_allocator"]
    if wanted is None or not sizes or wanted > sizes[0]:
        return []
    fewest = (FEWEST_BLOCKS - 1) * sizes[0]  # one more is padding
    return [
        f"memory.kv_tokens={wanted}: the smallest KV pool has {FEWEST_BLOCKS - 1} blocks of kv_allocator.block_size="
        f"{sizes[0] // ranks} tokens{f' on each of {ranks} ranks' if ranks > 1 else ''}; use memory.kv_tokens={fewest}"
    ]


def _execution_problems(chosen: list[Chosen], settings: Settings, model: ModelFacts, device: DeviceFacts) -> list[str]:
    if settings.execution == AUTO:
        return []
    reasons = reasons_against(settings.execution, device, _dtype(settings, model, device), *_attention(chosen))
    return [f"execution={settings.execution}: {reason}; use execution=auto" for reason in reasons]


def _attention(chosen: list[Chosen]) -> tuple[str, bool]:
    """The attention kernel's name, and whether it can be captured."""
    for one in chosen:
        if one.slot == "attention_kernel":
            return one.offer.name, CAPTURABLE in one.offer.provider.provides
    return "none", False


def _dtype(settings: Settings, model: ModelFacts, device: DeviceFacts) -> str:
    """The checkpoint's dtype; float32 for the small bundled model on a CPU, where exactness costs little."""
    if settings.model.dtype != AUTO:
        return settings.model.dtype
    if settings.model.path == BUNDLED and device.kind == "cpu":
        return "float32"
    return model.dtype


def slot_choice(one: Chosen) -> SlotChoice:
    return SlotChoice(
        slot=one.slot,
        name=one.offer.name,
        factory=one.offer.provider.factory,
        config_class=values.class_path(one.offer.config_class),
        config=one.config,
        origin=str(one.offer.origin),
        requested=one.pick.requested,
        passed_over=one.passed_over,
        sources=one.offer.provider.sources,
    )


def _notes(chosen: list[Chosen], settings: Settings) -> tuple[str, ...]:
    notes = [
        f"{one.label} runs on the host: a step with drafts waits for the tokens of the step before"
        for one in chosen
        if HOST_DRAFTER in one.offer.provider.provides and settings.overlap
    ]
    notes += [
        f"{one.slot}=auto chose {one.offer.qualified}; {listing(one.fits_too)} would fit, too"
        for one in chosen
        if one.fits_too
    ]
    present = {one.slot: one.config for one in chosen}
    ranks, scheduler = present.get("parallelism", {}), present.get("scheduler", {})
    if ranks and scheduler and ranks["pcp"] > 1 and scheduler["token_budget"] < ranks["pcp_min_tokens"]:
        notes.append(
            f"parallelism.pcp={ranks['pcp']} shares out no step: scheduler.token_budget={scheduler['token_budget']} is "
            f"less than parallelism.pcp_min_tokens={ranks['pcp_min_tokens']}"
        )
    needs_key = settings.server.api_key is not None or settings.server.keys is not None
    if not needs_key and settings.server.host not in ("127.0.0.1", "::1", "localhost"):
        notes.append(f"server.host={settings.server.host} without server.api_key: anyone who reaches it may use it")
    return tuple(notes)
