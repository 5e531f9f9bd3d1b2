"""TTFT is the problem, and prompts are not long: requests wait, for a row, for blocks, or after another's prompt."""

from __future__ import annotations

from engine_lab.doctor.classes import CHAT_ITL_MS
from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.figures import decode_row_ms, machine_of
from engine_lab.doctor.rule import CLIENTS, Remedy, Rule

BRANCH = "TTFT, no long prompt: queue depth"
WAITS = ("waiting_mean", "waiting_share", "running_max", "queue_ms", "kv_used_max")
ENOUGH = {"requests": 3.0, "steps": 20.0}
BATCHES_WELL = 1.5
"""Twice the rows bring so many times the requests per second: then the device has room."""
FEW, BUSY = 16, 0.7
SMALL_CHUNK, SMALL_BUDGET, LARGE_BUDGET = 96, 256, 2048
"""Tokens. Of a smaller chunk the fixed cost of a step is a good part, on any machine."""
LOW_TARGET_MS = 20.0
"""A lower target for ITL leaves hardly any time for prompts."""


def without_queue(figures: Figures, most: float = 0.95) -> Remedy | None:
    """TTFT without most of its waiting."""
    waited = figures["queue_ms"] + figures["dispatch_ms"]
    share = waited / (waited + figures["prefill_ms"] + figures["tokenize_ms"])
    return Remedy(max(0.01, 1.0 - most * share), 1.0 - 0.3 * share) if share >= 0.3 else None


def is_growing(figures: Figures) -> bool:
    """Whether more wait at a window's end than at its beginning, by a good part of what was served."""
    return figures["waiting_growth"] >= max(2.0, 0.15 * figures["requests"])


def waits_for_row(engine: Engine, figures: Figures) -> bool:
    limit = engine.settings.get("scheduler.max_requests", 0)
    return figures["waiting_share"] >= 0.6 and figures["running_max"] >= limit and figures["kv_used_max"] < 0.85


def more_rows_serve_more(figures: Figures) -> bool:
    """By the step cost, for twice the rows."""
    if "cost.base_ms" not in figures:
        return False
    rows = max(1.0, figures["rows"])
    fixed = figures["cost.base_ms"] + figures.get("gap_ms", 0.0)
    decoding = rows * decode_row_ms(figures)
    return 2 * (fixed + decoding) >= BATCHES_WELL * (fixed + 2 * decoding)


def static(engine: Engine, figures: Figures) -> Remedy | None:
    if engine.slots.get("scheduler") != "static" or figures["waiting_share"] < 0.2:
        return None
    remedy = without_queue(figures)
    return remedy and Remedy(remedy.low, remedy.high, ("scheduler=chunked_prefill",))


def too_few_rows(engine: Engine, figures: Figures) -> Remedy | None:
    limit = engine.settings.get("scheduler.max_requests", 0)
    if engine.slots.get("scheduler") == "static" or not waits_for_row(engine, figures):
        return None
    if not more_rows_serve_more(figures) and (limit >= FEW or is_growing(figures)):
        return None
    remedy, wanted = without_queue(figures), limit
    while wanted < min(256, limit + 2 * figures["waiting_mean"]):
        wanted *= 2
    words, pays = (f"scheduler.max_requests={wanted}",), who_shares_steps(figures)
    return remedy and Remedy(remedy.low, remedy.high, words, "", pays, is_trade=machine_of(figures).is_busy)


def who_shares_steps(figures: Figures) -> str:
    """Who pays for more rows. Threads that wait for cores do so the longer, the more a step computes."""
    if machine_of(figures).is_busy:
        return "who runs now: ITL, on a busy machine several times as high"
    return "who runs now: ITL, as a step computes more rows; less than the waiting that ends"


def overload(engine: Engine, figures: Figures) -> Remedy | None:
    limit = engine.settings.get("scheduler.max_requests", 0)
    if figures["waiting_share"] < 0.8 or figures["busy_share"] < BUSY or figures["running_max"] < limit:
        return None
    if engine.slots.get("scheduler") == "static" or too_few_rows(engine, figures):
        return None
    remedy = without_queue(figures)
    advice = "More arrives than one engine serves: add an engine (engine plan says how many), or limit arrivals."
    return remedy and Remedy(remedy.low, remedy.high, (), advice)


def bursts(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["arrivals_dispersion"] < 3.0 or figures["busy_share"] > BUSY:
        return None
    if figures["ttft_p95_ms"] < 2.0 * figures["ttft_p50_ms"] and figures["rows"] < 2.0:
        return None
    advice = "Requests come in bursts while the engine idles between them: spread them out at the client."
    return Remedy(0.2, 0.8, (), advice, change="spread")


def refused(engine: Engine, figures: Figures) -> Remedy | None:
    arrived = figures["rejected"] + figures["requests"]
    limit = engine.settings.get("server.max_queue", 0)
    if figures["rejected"] < max(3.0, 0.05 * arrived) or limit >= 128:
        return None
    advice = "Refused requests come again later or not at all. If a longer queue only waits longer, add an engine."
    pays = "everybody: TTFT, as requests wait that are refused now"
    return Remedy(0.0, 0.95, (f"server.max_queue={max(256, 4 * limit)}",), advice, pays, is_trade=True)


def small_chunks(engine: Engine, figures: Figures) -> Remedy | None:
    budget, target = engine.settings.get("scheduler.token_budget"), engine.settings.get("scheduler.itl_target_ms")
    is_low, is_small = 0.0 < (target or 0.0) < LOW_TARGET_MS, budget is not None and budget <= SMALL_BUDGET
    tokens = figures["prompt_mean"] * (1.0 - figures["cached_share"])
    chunks = figures["chunks_mean"]
    if not (is_low or is_small) or chunks < 4.0 or tokens / chunks > SMALL_CHUNK:
        return None
    words = [f"scheduler.token_budget={LARGE_BUDGET}"] * is_small
    words += [f"scheduler.itl_target_ms={CHAT_ITL_MS:g}"] * (is_low or not target)
    pays = f"who decodes beside a prompt: ITL up to {CHAT_ITL_MS:g} ms, the limit of class chat"
    if is_busy := machine_of(figures).is_busy:
        pays = "who decodes beside a prompt: ITL, on a busy machine more than twice the target"
    return Remedy(max(0.05, 2.0 / chunks), 0.92, tuple(words), "", pays, is_busy)


RULES = (
    Rule(
        "static_batching",
        BRANCH,
        "The scheduler waits for a whole batch to end before it admits others.",
        "ttft_p50_ms",
        ("waiting_share", "queue_ms", "ttft_p50_ms"),
        static,
        ENOUGH,
    ),
    Rule(
        "too_few_rows",
        BRANCH,
        "Requests wait for a row while the KV cache has room: scheduler.max_requests is too low.",
        "ttft_p50_ms",
        WAITS,
        too_few_rows,
        ENOUGH,
    ),
    Rule(
        "overload",
        BRANCH,
        "More requests come at once than the engine serves, and more rows would not serve more.",
        "ttft_p50_ms",
        (*WAITS, "waiting_growth", "rejected", "busy_share"),
        overload,
        ENOUGH,
    ),
    Rule(
        "bursts",
        BRANCH,
        "Requests arrive in bursts and wait for each other, with idle time in between.",
        "ttft_p95_ms",
        ("arrivals_dispersion", "busy_share", "ttft_p50_ms", "ttft_p95_ms"),
        bursts,
        {"requests": 8.0},
        where=CLIENTS,
    ),
    Rule(
        "queue_limit",
        BRANCH,
        "Requests are refused because few may wait: server.max_queue is too low.",
        "rejected",
        ("rejected", "requests"),
        refused,
        {"requests": 1.0},
    ),
    Rule(
        "token_budget_too_small",
        "TTFT, long prompt: chunked prefill",
        "A prompt takes many small steps, and each step has a fixed cost.",
        "ttft_p50_ms",
        ("chunks_mean", "prompt_mean", "cached_share"),
        small_chunks,
        ENOUGH,
    ),
)
