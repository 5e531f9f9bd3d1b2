"""TTFT is the problem, and prompts are long: what they share is computed again, or they hold up others."""

from __future__ import annotations

from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.rule import CLIENTS, Remedy, Rule

BRANCH = "TTFT, long prompt: prefix caching"
EXPLAINED = {"explained": 3.0, "requests": 3.0, "prompt_p50": 64.0}


def reuse(figures: Figures, share: float) -> Remedy | None:
    """If ``share`` of a prompt need not be computed: prefill falls by as much, at best waiting for others', too."""
    computed = 1.0 - figures["cached_share"]
    ours, others = figures["prefill_ms"], figures["queue_ms"] + figures["dispatch_ms"]
    total = ours + others + figures["tokenize_ms"]
    saved = min(0.95, share / computed) if computed > 0.0 else 0.0
    if saved * ours < 0.15 * total:
        return None
    return Remedy(max(0.02, 1.0 - 1.1 * saved * (ours + others) / total), 1.0 - 0.4 * saved * ours / total)


def with_advice(remedy: Remedy | None, advice: str, *overrides: str, change: str = "") -> Remedy | None:
    return remedy and Remedy(remedy.low, remedy.high, overrides, advice, change=change)


def broken_early(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["early_share"] < 0.5:
        return None
    alike = 0.9 - figures["cached_share"]  # after the difference, prompts go on alike: how far is not known
    return with_advice(
        reuse(figures, alike),
        "Put what differs (a date, a number, an id) after what all prompts share: static text first. GET "
        "/engine/requests/ID says which token it is.",
        change="share",
    )


def breakpoint_moves(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["moved_share"] < 0.5:
        return None
    stable = 0.9 * figures["breakpoint_share"] - figures["shared_share"]  # as far as what is before it is stable
    return with_advice(
        reuse(figures, stable),
        "Put the breakpoint (cache_control, prompt_cache_breakpoint) at the end of what stays the same, and after that "
        "what changes with each request: what is written at a breakpoint is read only if all before it is equal.",
        change="share",
    )


def reordered(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["order_share"] < 0.2:
        return None
    return with_advice(
        reuse(figures, 0.5 * (1.0 - figures["cached_share"])),
        "Keep one order of the parts that prompts share (documents, tools, examples): sorted by name, not by rank; or "
        "put them after what is always the same, and fewer of them.",
        change="share",
    )


def cache_off(engine: Engine, figures: Figures) -> Remedy | None:
    if engine.slots.get("kv_allocator") == "prefix_cache" or figures["shared_share"] < 0.25:
        return None
    return with_advice(reuse(figures, figures["shared_share"]), "", "kv_allocator=prefix_cache")


def evicted(engine: Engine, figures: Figures) -> Remedy | None:
    lost = figures["shared_share"] - figures["cached_share"]
    if engine.slots.get("kv_allocator") != "prefix_cache" or figures["evicted_share"] < 0.2 or lost < 0.1:
        return None
    remedy = reuse(figures, lost)
    advice = "Prefixes are evicted before they are used again."
    return remedy and Remedy(remedy.low, remedy.high, *more_kv(engine, advice))


def more_kv(engine: Engine, advice: str) -> tuple[tuple[str, ...], str, str, bool]:
    """Overrides, advice, who pays and whether it is a trade: four times the KV tokens where their number was set, else
    smaller ones, which steps of a CPU compute more slowly with."""
    if engine.settings.get("memory.kv_tokens") is not None:
        return (f"memory.kv_tokens={4 * engine.settings['memory.kv_tokens']}",), advice, "", False
    if engine.slots.get("kv_format") != "native":
        return (), advice, "", False
    if engine.kind == "cpu":
        return ("kv_format=int8",), advice, "everybody: ITL up to x 1.6, as int8 keys are converted", True
    return ("kv_format=int8",), advice, "", False


RULES = (
    Rule(
        "prefix_broken_early",
        BRANCH,
        "Prompts differ in a short text near their beginning and go on alike: nothing after it is found in the cache.",
        "ttft_p50_ms",
        ("early_share", "cached_share", "prompt_p50", "prefill_ms"),
        broken_early,
        EXPLAINED,
        where=CLIENTS,
    ),
    Rule(
        "breakpoint_moves",
        BRANCH,
        "Prompts differ before their cache breakpoints: what is kept up to them is never read.",
        "ttft_p50_ms",
        ("moved_share", "breakpoint_share", "shared_share", "prefill_ms"),
        breakpoint_moves,
        EXPLAINED,
        where=CLIENTS,
    ),
    Rule(
        "prompt_parts_reordered",
        BRANCH,
        "Prompts have the same parts in another order, so the prefix cache finds only what is before them.",
        "ttft_p50_ms",
        ("order_share", "cached_share", "prompt_p50", "prefill_ms"),
        reordered,
        EXPLAINED,
        where=CLIENTS,
    ),
    Rule(
        "prefix_cache_off",
        BRANCH,
        "Prompts begin alike, and this allocator does not keep what was computed.",
        "ttft_p50_ms",
        ("shared_share", "cached_share", "prompt_p50", "prefill_ms"),
        cache_off,
        EXPLAINED,
    ),
    Rule(
        "prefix_evicted",
        BRANCH,
        "What prompts share was in the prefix cache and had to make room.",
        "ttft_p50_ms",
        ("evicted_share", "shared_share", "cached_share", "prefill_ms"),
        evicted,
        EXPLAINED,
    ),
)
