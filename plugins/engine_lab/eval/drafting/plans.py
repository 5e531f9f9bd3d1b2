"""The engines of a comparison: the plan without drafts, and one for each drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.assembly.assemble import alone, assemble, configure
from engine.assembly.plan import EnginePlan
from engine_lab.eval.baseline import undrafted_override
from engine_lab.eval.drafting.options import DraftingOptions, is_about_drafting
from engine_lab.shared.errors import EvalError


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine and the overrides it comes from."""

    label: str
    overrides: tuple[str, ...]
    plan: EnginePlan

    @property
    def max_width(self) -> int:
        """Most draft tokens a decode step."""
        return self.plan.drafter.max_width

    @property
    def max_requests(self) -> int:
        return self.plan.scheduler.max_requests


def settings_of(options: DraftingOptions) -> list[Setting]:
    """The engine without drafts first. Raises :class:`AssemblyError`, and :class:`EvalError` for a drafter that drafts
    nothing, or a batch that an engine does not hold."""
    shared = tuple(word for word in options.overrides if not is_about_drafting(word))
    plain = undrafted_override(configure(shared, options.config_dirs).discovered)
    found = [_setting((*shared, plain), plain, options)]
    for words in options.drafters:
        label = " ".join(words)
        setting = _setting((*options.overrides, *words), label, options)
        if setting.max_width < 1:
            raise EvalError(
                f"--drafter {label!r}: drafts nothing, as the engine it would be compared with; expected drafter=NAME "
                "of another drafter, with drafter.max_width of at least 1"
            )
        found.append(setting)
    for setting in found:
        _check_rows(setting, options.batches)
    return found


def _setting(overrides: tuple[str, ...], label: str, options: DraftingOptions) -> Setting:
    return Setting(label, overrides, alone(assemble(overrides, config_dirs=options.config_dirs, download=True)))


def _check_rows(setting: Setting, batches: Sequence[int]) -> None:
    if max(batches) > setting.max_requests:
        raise EvalError(
            f"--batch {max(batches)}: scheduler.max_requests={setting.max_requests} of {setting.label} holds no more "
            "at once; set that larger, or leave the batch size out"
        )


def pool_override(options: DraftingOptions, settings: Sequence[Setting], longest: int) -> tuple[str, ...]:
    """A KV pool for the largest batch instead of most of the device's memory, which several engines share here.

    ``longest``: tokens of the longest prompt. Nothing where the user has said how much memory to take.
    """
    if any(word.lstrip("+").startswith("memory.") for word in options.overrides):
        return ()
    width = max(setting.max_width for setting in settings)
    block = max(setting.plan.kv_allocator.block_size for setting in settings)
    # A block more for a prefix hit that gives up its last block, one for what is partly filled, one to spare.
    tokens = max(options.batches) * (longest + options.answer_tokens + width + 1 + 3 * block)
    return (f"memory.kv_tokens={tokens}",)
