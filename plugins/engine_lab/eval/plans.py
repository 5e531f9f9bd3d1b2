"""The plans of an evaluation: what is judged, and the same model unquantized beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.assembly.assemble import alone, assemble, configure
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import shown
from engine.contracts.model import DeviceFacts, ModelConfig
from engine_lab.eval.baseline import lossless_override
from engine_lab.eval.options import EvalOptions
from engine_lab.shared.errors import EvalError
from engine_lab.shared.flags import assignment
from engine_lab.shared.stated import stated_plan

LOSSY_SLOTS = ("quantizer", "kv_format")
"""Slots in which the reference differs from the plans."""
REFERENCE_NOTE = (
    "in the reference, which is the same with {}; what belongs to the plans alone, as a preset that sets values of "
    "these, goes into --compare"
)
"""``{}``: overrides."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A plan and the overrides it comes from."""

    label: str
    overrides: tuple[str, ...]
    plan: EnginePlan


def contestants(options: EvalOptions) -> list[Contestant]:
    """The plans to judge. Raises :class:`AssemblyError`."""
    found = []
    for words in options.compare or ((),):
        overrides = (*options.overrides, *words)
        plan = _plan(overrides, options)
        label = " ".join(words) or " ".join(f"{slot}={plan.choice(slot).name}" for slot in LOSSY_SLOTS)
        found.append(Contestant(label, overrides, plan))
    return found


def reference_of(options: EvalOptions) -> Contestant:
    """The unquantized model. Raises :class:`AssemblyError`, also where it must be named and is not, and
    :class:`EvalError` where no plugin is lossless."""
    overrides = [word for word in options.overrides if not _is_lossy(word)]
    if options.reference is not None:
        overrides.append(assignment("model.path", options.reference))
    if options.reference_dtype is not None:
        overrides.append(f"model.dtype={options.reference_dtype}")
    configured = configure(overrides, options.config_dirs)
    given = configured.composed.settings.model.path
    facts = _facts(given, options.reference is not None)
    if facts.quantization is not None:
        flag = "model.path" if options.reference is None else "--reference"
        method = shown(facts.quantization.get("quant_method", "unknown"))
        raise AssemblyError(
            [
                f"{flag}={given} is quantized already (quant_method={method}), so it cannot be the reference; give "
                "the checkpoint it was made from with --reference DIR"
            ]
        )
    lossless = [lossless_override(slot, configured.discovered) for slot in LOSSY_SLOTS]
    overrides += lossless
    try:
        plan = _plan(overrides, options)
    except AssemblyError as error:
        note = REFERENCE_NOTE.format(" ".join(lossless))
        raise AssemblyError([f"{problem} ({note})" for problem in error.problems]) from error
    return Contestant(" ".join(lossless), tuple(overrides), plan)


def _facts(path: str, is_named: bool) -> ModelConfig:
    """``is_named``: by ``--reference``, which messages then say."""
    try:
        return model_config(path, download=True)
    except AssemblyError as error:
        if not is_named:
            raise
        problems = [problem.replace(f"model.path={path}", f"--reference {path}") for problem in error.problems]
        raise AssemblyError(problems) from error


def check_vocabulary(reference: EnginePlan, plan: EnginePlan) -> None:
    """Raise :class:`EvalError` unless both predict the same tokens."""
    if reference.model.vocab_size != plan.model.vocab_size:
        raise EvalError(
            f"the reference {reference.model.path} has {reference.model.vocab_size} tokens and {plan.model.path} has "
            f"{plan.model.vocab_size}: expected the same model before and after quantization"
        )


def _plan(overrides: Sequence[str], options: EvalOptions) -> EnginePlan:
    if options.cuda_capability is None:
        return alone(assemble(overrides, config_dirs=options.config_dirs, download=not options.capacity_only))
    assert options.memory is not None
    device = DeviceFacts("cuda", "a stated card", options.cuda_capability, options.memory)
    return alone(stated_plan(overrides, options.config_dirs, device))


def _is_lossy(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return key.partition(".")[0] in LOSSY_SLOTS
