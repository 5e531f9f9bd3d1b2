"""Which overrides would make a model fit? Every answer is an estimate run again with the override in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, replace
from itertools import combinations
from typing import Any

from engine.assembly import values
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.plan import EnginePlan, SlotChoice
from engine.contracts.config import SLOT_CONFIGS
from engine.loop.memory.judge import Judge
from engine.loop.memory.text import size

MOST_FRACTION = 0.95
"""What is left is for fragmentation and for what other processes do meanwhile."""
MOST_PAIRS = 3
Apply = Callable[[EnginePlan, int], EnginePlan]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan with some overrides in place."""

    plan: EnginePlan
    overrides: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    """What each override means to the user."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Overrides that were checked to suffice."""

    overrides: tuple[str, ...]
    gives: str
    needed: int
    """Bytes, at the peak, with the smallest useful KV pool."""
    budget: int
    """Bytes that may be used."""

    def __str__(self) -> str:
        return f"{' '.join(self.overrides)}  ({self.gives}; needs {size(self.needed)} of {size(self.budget)})"


@dataclass(frozen=True, slots=True)
class Move:
    """One setting that could be worse: ``options`` many values, of which option 0 takes the least memory and loses
    the most."""

    key: str
    options: int
    apply: Apply
    override: Callable[[int], str]
    gives: Callable[[int], str]

    def variant(self, base: Variant, option: int) -> Variant:
        plan = self.apply(base.plan, option)
        return Variant(plan, (*base.overrides, self.override(option)), (*base.gives, self.gives(option)))

    def fitting(self, base: EnginePlan, judge: Judge) -> int | None:
        """The option of least loss that makes ``base`` fit."""
        if not self.options or not judge.fits(self.apply(base, 0)):
            return None
        low, high = 0, self.options - 1  # low fits
        while low < high:
            middle = (low + high + 1) // 2
            if judge.fits(self.apply(base, middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def fitted(self, base: Variant, judge: Judge) -> Variant | None:
        """``base`` with that option."""
        option = self.fitting(base.plan, judge)
        return None if option is None else self.variant(base, option)


def remedies(
    plan: EnginePlan, judge: Judge, discovered: Discovered, note: Note = lambda text: None
) -> tuple[Remedy, ...]:
    """Single overrides that suffice, the least loss first; else pairs; else everything at once; else nothing.

    ``note`` is given a line for every plugin that could not even be asked.
    """
    base, moves = Variant(plan), list(_moves(plan, discovered, note))
    singles = [found for move in moves if (found := move.fitted(base, judge)) is not None]
    if singles:
        return tuple(_remedy(found, judge) for found in singles)
    pairs = list(_pairs(base, moves, judge))
    if pairs:
        return tuple(_remedy(found, judge) for found in pairs[:MOST_PAIRS])
    everything = _everything(base, moves, judge)
    return () if everything is None else (_remedy(everything, judge),)


def _pairs(base: Variant, moves: Sequence[Move], judge: Judge) -> Iterator[Variant]:
    usable = [move for move in moves if move.options]
    for first, second in sorted(combinations(range(len(usable)), 2), key=sum):
        one, other = usable[first], usable[second]
        if one.key == other.key:
            continue
        option = other.fitting(one.apply(base.plan, 0), judge)
        if option is not None:  # then the first one need not go all the way
            least = one.fitting(other.apply(base.plan, option), judge)
            assert least is not None
            yield other.variant(one.variant(base, least), option)


def _everything(base: Variant, moves: Sequence[Move], judge: Judge) -> Variant | None:
    """Every move in turn as far as it goes (of several for one key, the one that saves most), until it fits; then
    each of them only as far as it must."""
    by_key: dict[str, list[Move]] = {}
    for move in moves:
        if move.options:
            by_key.setdefault(move.key, []).append(move)
    taken: list[tuple[Move, int]] = []
    for same in by_key.values():
        plan = _applied(base.plan, taken)
        tried = [(needs.smallest, i) for i, m in enumerate(same) if (needs := judge.needs(m.apply(plan, 0)))]
        if tried:
            taken.append((same[min(tried)[1]], 0))
        if judge.fits(_applied(base.plan, taken)):
            return _with_all(base, _relaxed(base, taken, judge))
    return None


def _relaxed(base: Variant, taken: Sequence[tuple[Move, int]], judge: Judge) -> list[tuple[Move, int]]:
    """``taken``, which fits, without the moves it can do without, the others at their least loss. The share of memory
    comes last: it is the one that costs nothing."""
    needed = list(taken)
    for step in reversed(taken):
        rest = [one for one in needed if one is not step]
        if judge.fits(_applied(base.plan, rest)):
            needed = rest
    for i in (*range(1, len(needed)), 0):
        move, _ = needed[i]
        option = move.fitting(_applied(base.plan, [*needed[:i], *needed[i + 1 :]]), judge)
        assert option is not None, "it fitted with option 0"
        needed[i] = (move, option)
    return needed


def _applied(plan: EnginePlan, taken: Sequence[tuple[Move, int]]) -> EnginePlan:
    for move, option in taken:
        plan = move.apply(plan, option)
    return plan


def _with_all(base: Variant, taken: Sequence[tuple[Move, int]]) -> Variant:
    for move, option in taken:
        base = move.variant(base, option)
    return base


def _remedy(found: Variant, judge: Judge) -> Remedy:
    needs, room = judge.needs(found.plan), judge.room(found.plan)
    assert needs is not None and needs.smallest <= room.budget, f"unverified remedy {found.overrides}"
    return Remedy(found.overrides, ", ".join(found.gives), needs.smallest, room.budget)


def _moves(plan: EnginePlan, discovered: Discovered, note: Note) -> Iterator[Move]:
    """From the smallest loss to the user to the largest."""
    yield _fraction(plan)
    yield _length(plan)
    yield _scheduler(plan, "max_requests", 1, 1, "requests at once")
    yield _scheduler(plan, "token_budget", 64, 16, "tokens a step, so prompts take more steps")
    yield from _others(plan, "kv_format", discovered, note)
    if plan.dtype == "float32":
        yield _dtype(plan, "bfloat16")
    yield from _others(plan, "quantizer", discovered, note)


def _fraction(plan: EnginePlan) -> Move:
    most, now = round(MOST_FRACTION * 100), int(plan.settings.memory.fraction * 100)

    def share(option: int) -> float:
        return (most - option) / 100

    def apply(plan: EnginePlan, option: int) -> EnginePlan:
        return _with_memory(plan, fraction=share(option))

    return Move(
        "memory.fraction",
        max(0, most - now),
        apply,
        lambda option: f"memory.fraction={share(option):g}",
        lambda option: f"leaves {1 - share(option):.0%} of the free memory to others",
    )


def _length(plan: EnginePlan) -> Move:
    """Shorter requests; or, where the pool's size is set, a smaller pool."""
    block_size, pool = int(plan.choice("kv_allocator").config["block_size"]), plan.settings.memory.kv_tokens
    now = plan.max_len if pool is None else pool

    def tokens(option: int) -> int:
        return (option + 2) * block_size

    options = max(0, -(-now // block_size) - 2)
    if pool is None:
        return Move(
            "model.max_len",
            options,
            lambda plan, option: _with_max_len(plan, tokens(option)),
            lambda option: f"model.max_len={tokens(option)}",
            lambda option: f"requests of up to {tokens(option)} tokens instead of {now}",
        )
    return Move(
        "memory.kv_tokens",
        options,
        lambda plan, option: _with_memory(plan, kv_tokens=tokens(option)),
        lambda option: f"memory.kv_tokens={tokens(option)}",
        lambda option: f"a KV pool of {tokens(option)} tokens instead of {now}",
    )


def _scheduler(plan: EnginePlan, name: str, lowest: int, step: int, what: str) -> Move:
    now = int(plan.choice("scheduler").config[name])

    def value(option: int) -> int:
        return lowest + option * step

    return Move(
        f"scheduler.{name}",
        max(0, -(-(now - lowest) // step)),
        lambda plan, option: _with_config(plan, "scheduler", name, value(option)),
        lambda option: f"scheduler.{name}={value(option)}",
        lambda option: f"{value(option)} instead of {now} {what}",
    )


def _dtype(plan: EnginePlan, dtype: str) -> Move:
    def apply(plan: EnginePlan, option: int) -> EnginePlan:
        settings = replace(plan.settings, model=replace(plan.settings.model, dtype=dtype))
        return replace(plan, dtype=dtype, settings=settings)

    text = f"computes in {dtype} instead of {plan.dtype}: less exact"
    return Move("model.dtype", 1, apply, lambda option: f"model.dtype={dtype}", lambda option: text)


def _plugin(choice: SlotChoice, offer: Offer, discovered: Discovered) -> Move:
    unique = len(discovered.named(offer.slot, offer.name)) == 1
    override = f"{offer.slot}={offer.name}" if unique else f"{offer.slot}.plugin={offer.qualified}"
    return Move(
        offer.slot,
        1,
        lambda plan, option: replace(plan, slots={**plan.slots, offer.slot: (choice,)}),
        lambda option: override,
        lambda option: offer.provider.doc.rstrip(".") or f"another {offer.slot}",
    )


def _others(plan: EnginePlan, slot: str, discovered: Discovered, note: Note) -> Iterator[Move]:
    """Other plugins of a slot that say they can serve this model here, with what is selected beside them."""
    now = plan.choice(slot)
    for offer in discovered.of_slot(slot):
        requires = offer.provider.requires.items()
        if offer.provider.factory == now.factory:
            continue
        if not all(_provided(plan, other, needs, discovered) for other, needs in requires):
            continue
        try:
            choice = _choice(now, offer, plan)
        except Exception as error:  # a third party's function, of a plugin that nobody selected
            note(f"{slot}={offer.name} was not tried: asking {offer.origin} raised {type(error).__name__}: {error}")
            continue
        if choice is not None:
            yield _plugin(choice, offer, discovered)


def _choice(now: SlotChoice, offer: Offer, plan: EnginePlan) -> SlotChoice | None:
    """The offer with its defaults, and with what is set for the slot; ``None`` where it says that it cannot. Raises
    what its own functions raise."""
    if offer.provider.unsupported(plan.model, plan.device):
        return None
    try:
        built = values.build(offer.config_class, _set_for_slot(now))
    except ValueError:
        return None  # it does not take what is set, or needs a setting that nobody made
    if built.unsupported(plan.model, plan.device):
        return None
    return SlotChoice(
        slot=offer.slot,
        name=offer.name,
        factory=offer.provider.factory,
        config_class=values.class_path(offer.config_class),
        config=values.to_plain(built),
        origin=str(offer.origin),
        requested=offer.name,
    )


def _set_for_slot(now: SlotChoice) -> dict[str, Any]:
    """Of what all plugins of the slot have in common, the values that are not the selected plugin's own defaults."""
    common = SLOT_CONFIGS[now.slot].__dataclass_fields__
    own: dict[str, Field[Any]] = values.load(now.config_class).__dataclass_fields__
    return {key: value for key, value in now.config.items() if key in common and value != _default(own[key])}


def _default(field: Field[Any]) -> Any:
    """``MISSING`` for a field that must be set."""
    if field.default is MISSING and field.default_factory is MISSING:
        return MISSING
    return values.to_plain(field.default if field.default_factory is MISSING else field.default_factory())


def _provided(plan: EnginePlan, slot: str, needs: Sequence[str], discovered: Discovered) -> bool:
    chosen = {(choice.name, choice.factory) for choice in plan.slots[slot]}
    offers = (o for o in discovered.of_slot(slot) if (o.name, o.provider.factory) in chosen)
    return set(needs) <= {capability for offer in offers for capability in offer.provider.provides}


def _with_memory(plan: EnginePlan, *, fraction: float | None = None, kv_tokens: int | None = None) -> EnginePlan:
    memory = plan.settings.memory
    memory = replace(memory, fraction=fraction or memory.fraction, kv_tokens=kv_tokens or memory.kv_tokens)
    return replace(plan, settings=replace(plan.settings, memory=memory))


def _with_max_len(plan: EnginePlan, tokens: int) -> EnginePlan:
    settings = replace(plan.settings, model=replace(plan.settings.model, max_len=tokens))
    return replace(plan, max_len=tokens, settings=settings)


def _with_config(plan: EnginePlan, slot: str, name: str, value: int) -> EnginePlan:
    choice = plan.choice(slot)
    changed = replace(choice, config={**choice.config, name: value})
    return replace(plan, slots={**plan.slots, slot: (changed,)})
