"""The KV cache is full: requests wait for blocks, or lose them and are computed again."""

from __future__ import annotations

from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.figures import machine_of
from engine_lab.doctor.rule import Remedy, Rule
from engine_lab.doctor.rules.prompts import more_kv
from engine_lab.doctor.rules.queueing import who_shares_steps

BRANCH = "KV usage high: memory"
ENOUGH = {"requests": 3.0, "steps": 20.0}


def too_small(engine: Engine, figures: Figures) -> Remedy | None:
    """Fill alone is no sign: only blocks that were taken away, or waited for while rows are free."""
    rows = engine.settings.get("scheduler.max_requests", 0)
    waits = figures["waiting_share"] >= 0.5 and figures["running_max"] < rows and figures["kv_used_max"] >= 0.7
    taken = figures["preemptions"] >= 0.2 * figures["requests"]
    if not (waits or taken) or reserves(engine, figures):
        return None
    advice = "Or fewer requests at once (scheduler.max_requests), or shorter prompts and answers."
    words, advice, pays, is_trade = more_kv(engine, advice)
    pays = "; ".join(filter(None, (pays, who_shares_steps(figures))))
    return Remedy(0.2, 0.9, words, advice, pays, bool(words) and (is_trade or machine_of(figures).is_busy))


def reserves(engine: Engine, figures: Figures) -> bool:
    """Whether blocks are reserved for answers several times as long as any that comes."""
    is_static = engine.slots.get("kv_allocator") == "contiguous"
    return is_static and figures["max_tokens_p50"] >= 4.0 * figures["output_max"]


def reservation(engine: Engine, figures: Figures) -> Remedy | None:
    if not reserves(engine, figures) or figures["waiting_share"] < 0.5:
        return None
    advice = f"Or ask for what answers need: max_tokens={round(1.2 * figures['output_max'])}."
    return Remedy(0.2, 0.9, ("kv_allocator=prefix_cache",), advice)


RULES = (
    Rule(
        "kv_too_small",
        BRANCH,
        "Running requests lose their KV blocks to others and are computed again, or wait for blocks.",
        "e2e_mean_ms",
        ("preemptions", "preempted_share", "kv_used_max", "waiting_share", "running_max"),
        too_small,
        ENOUGH,
    ),
    Rule(
        "max_tokens_too_high",
        BRANCH,
        "KV blocks are reserved for max_tokens, of which answers use a small part, while others wait.",
        "ttft_p50_ms",
        ("max_tokens_p50", "output_max", "waiting_share", "kv_used_max"),
        reservation,
        ENOUGH,
    ),
)
