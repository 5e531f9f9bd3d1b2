"""ITL is the problem: what a decode step costs, and what else is computed in it."""

from __future__ import annotations

from engine_lab.doctor.classes import CHAT_ITL_MS, WORSE
from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.figures import STEP_COST, decode_row_ms, machine_of
from engine_lab.doctor.rule import CLIENTS, Remedy, Rule

BRANCH = "ITL"
ENOUGH = {"steps": 20.0, "itl_count": 50.0}
"""Tokens, not requests that ended: those of a slow engine have not, yet."""
CHUNK_COST = (*STEP_COST, "cost.per_prefill_context_ms")
MOST_TARGET_MS = 100.0
"""For ITL, of a slow machine."""
SLOW_WEIGHTS_MS = 20.0
"""A step that takes so long for weights alone is far from the 30 ms that ITL should stay below."""
LONG = 1024
"""Tokens of a context from which on it may be called long."""
LARGE_CHUNK = 1280
"""Tokens that take long on any machine on which a stall would be looked for."""
STALL_MS = 40.0
"""Between two tokens: shorter is no stall."""


def is_one_long(figures: Figures) -> bool:
    return figures["prompt_max"] >= 5.0 * figures["prompt_p50"]


def shorter_steps(engine: Engine, figures: Figures, advice: str, change: str = "") -> Remedy:
    """With a target for ITL, so that chunks are as long as this machine computes in it. Each chunk pays a decode step
    on top: with a target of twelve of them the prompts themselves wait a tenth longer. Where there is a target, or none
    would help, the advice is all there is."""
    fixed = figures["itl_p50_ms"]
    target = min(MOST_TARGET_MS, max(CHAT_ITL_MS, 10.0 * round(1.2 * fixed)))
    stall = figures["itl_p999_ms"]
    if engine.settings.get("scheduler.itl_target_ms") or stall < 1.5 * target:
        return Remedy(0.05, 0.8, (), advice, change=change)
    chunked = () if engine.slots.get("scheduler") == "chunked_prefill" else ("scheduler=chunked_prefill",)
    words = (*chunked, f"scheduler.itl_target_ms={target:g}")
    longer = target / max(1e-9, target - fixed)
    if longer > 2.0:
        return Remedy(0.05, 0.8, (), advice, change=change)
    pays = f"who sends long prompts: TTFT up to x {longer:.2f}"
    low, high = min(0.5, 0.4 * target / stall), min(0.8, 3.0 * target / stall)
    return Remedy(low, high, words, advice, pays, longer > WORSE, change)


def budget_too_large(engine: Engine, figures: Figures) -> Remedy | None:
    """By the longest chunk: what it costs, or its size on a busy machine, where a long wait may have other reasons."""
    chunk, decode = figures["chunk_max"], figures["itl_p50_ms"]
    if engine.settings.get("scheduler.itl_target_ms") or is_one_long(figures) or chunk < 384:
        return None
    if machine_of(figures).is_busy or not all(name in figures for name in CHUNK_COST):
        is_large = chunk >= LARGE_CHUNK
    else:
        tokens_ms = chunk * (figures["cost.per_token_ms"] + chunk / 2 * figures["cost.per_prefill_context_ms"])
        is_large = figures["cost.per_row_ms"] + tokens_ms >= 5.0 * decode
    if not is_large or figures["stalled_share"] < 0.1 or figures["itl_p999_ms"] < 5.0 * decode:
        return None
    return shorter_steps(engine, figures, "Or a smaller scheduler.token_budget.")


def long_prompt(engine: Engine, figures: Figures) -> Remedy | None:
    """By what requests decoded beside, and how long their slowest tokens took beside their quickest: no step cost."""
    short = figures["short_prompt"]
    if figures["long_share"] > 0.8 or figures["long_computed"] < max(384.0, 4.0 * short):
        return None
    if figures["beside_max"] < max(256.0, 2.0 * short):
        return None
    if figures["itl_p999_ms"] < max(STALL_MS, 4.0 * figures["itl_p10_ms"]) or figures["stalled_share"] < 0.1:
        return None
    advice = "Send long prompts to an engine of their own, or shorten them (RAG)."
    return shorter_steps(engine, figures, advice, "without_long")


def wasted_drafts(engine: Engine, figures: Figures) -> Remedy | None:
    """By what is accepted: each token that is thrown away was computed. On a busy machine only where twice as many are
    thrown away as reach a client."""
    if engine.slots.get("drafter", "none") == "none" or figures["chains"] < 30:
        return None
    accepted, wasted = figures["accepted"] / figures["chains"], figures["drafted"] - figures["accepted"]
    least = 2.0 if machine_of(figures).is_busy else 0.15
    if accepted > 0.5 or wasted < least * figures["itl_count"]:
        return None
    pays = ""
    if figures["drafts_well_share"] >= 0.2:
        pays = f"{figures['drafts_well_share']:.0%} of requests, whose drafts are accepted: ITL as without a drafter"
    return Remedy(0.2, 0.99, ("drafter=none",), "Or drafts where text repeats itself.", pays, bool(pays))


def drafter(engine: Engine, figures: Figures) -> Remedy | None:
    """By the step cost: a step with drafts and what it brings, beside steps without."""
    if engine.slots.get("drafter", "none") == "none" or figures["chains"] < 10:
        return None
    rows = max(1.0, figures["rows"])
    drafts = figures["drafted"] / figures["steps"]
    accepted = figures["accepted"] / figures["steps"]
    plain = figures["cost.base_ms"] + rows * decode_row_ms(figures)
    drafted = plain + figures["draft_ms"] + drafts * figures["cost.per_token_ms"]
    tokens = (rows + accepted) / rows
    of_drafts = min(1.0, drafted / tokens / figures["itl_mean_ms"])  # of ITL; the rest are others' prompts
    ratio = 1.0 - of_drafts * (1.0 - plain * tokens / drafted)
    return Remedy(0.7 * ratio, min(0.97, 1.15 * ratio), ("drafter=none",)) if ratio <= 0.85 else None


def eager(engine: Engine, figures: Figures) -> Remedy | None:
    if engine.settings.get("execution") != "eager":
        return None
    words = ("execution=auto",) if engine.overlap or engine.kind == "cpu" else ("execution=auto", "overlap=true")
    return Remedy(0.2, 0.9, words, "With kernels that are compiled or captured, a step costs less of the host's time.")


def uncaptured(engine: Engine, figures: Figures) -> Remedy | None:
    if not any("uncaptured" in line for line in engine.lowering):
        return None
    if engine.slots.get("kv_format") == "native" or figures["preemptions"] > 0 or figures["kv_used_max"] > 0.45:
        return None
    advice = "The KV format pays where requests are preempted, and here none was."
    return Remedy(0.3, 0.95, ("kv_format=native",), advice)


def host_gap(engine: Engine, figures: Figures) -> Remedy | None:
    """Not on a CPU: what plans there takes a core from the step that runs meanwhile."""
    if engine.overlap or engine.kind == "cpu":
        return None
    share = figures["gap_ms"] / (figures["step_ms"] + figures["gap_ms"])
    return Remedy(max(0.05, 1.0 - share), 1.0 - 0.2 * share, ("overlap=true",)) if share >= 0.15 else None


def quantizer(engine: Engine, figures: Figures) -> Remedy | None:
    if engine.kind != "cpu" or engine.slots.get("quantizer") != "fp8":
        return None
    return Remedy(0.4, 0.97, ("quantizer=int8",), "This device multiplies int8, and has to convert fp8.")


def weights(engine: Engine, figures: Figures) -> Remedy | None:
    if engine.slots.get("quantizer") not in ("checkpoint", "none") or figures["cost.base_ms"] < SLOW_WEIGHTS_MS:
        return None
    if figures["cost.base_ms"] < 0.7 * (figures["cost.base_ms"] + figures["rows"] * decode_row_ms(figures)):
        return None
    return Remedy(0.4, 0.9, ("quantizer=int8",), "Rounded weights change answers a little: run engine eval.")


def long_context(engine: Engine, figures: Figures) -> Remedy | None:
    """By the bytes that a decode step reads: the step cost can only tell where the number of rows varies."""
    context = figures["prompt_mean"] + figures["output_mean"] / 2
    read = figures["rows"] * context * engine.kv_token_bytes
    share = read / (read + engine.weights_bytes)
    if context < LONG or not engine.kv_token_bytes:
        return None
    if share < 0.5:
        return None
    advice = "Shorten what every request carries: the history, or retrieved text (8,000 tokens for 2,000 is 4x)."
    return Remedy(max(0.05, 1.0 - share), 1.0 - 0.2 * share, (), advice)


def threads(engine: Engine, figures: Figures) -> Remedy | None:
    if engine.kind != "cpu" or engine.settings.get("threads") is None or figures["busy_share"] < 0.2:
        return None
    return Remedy(0.2, 0.95, ("threads=null",), "As many as the CPUs that this process may use.")


RULES = (
    Rule(
        "token_budget_too_large",
        "ITL: steps with prompts in them",
        "Prompts are computed in chunks so large that decoding waits for them.",
        "itl_p999_ms",
        ("prompt_p50", "chunk_max", "stalled_share", "itl_p50_ms"),
        budget_too_large,
        ENOUGH,
    ),
    Rule(
        "long_prompt_among_short",
        "ITL: steps with prompts in them",
        "A few prompts are much longer than the others, and decoding waits while they are computed.",
        "itl_p999_ms",
        ("long_share", "long_computed", "short_prompt", "beside_max", "stalled_share", "itl_p10_ms"),
        long_prompt,
        ENOUGH,
        where=CLIENTS,
    ),
    Rule(
        "drafts_not_accepted",
        "ITL: speculation",
        "Most drafts are computed and thrown away: the drafter does not guess this text, or this temperature.",
        "itl_mean_ms",
        ("drafted", "accepted", "chains", "drafts_well_share"),
        wasted_drafts,
        ENOUGH,
    ),
    Rule(
        "drafter_does_not_pay",
        "ITL: speculation",
        "Drafts cost more than the tokens that are accepted of them bring.",
        "itl_mean_ms",
        ("drafted", "accepted", "chains", "draft_ms", "rows", *STEP_COST),
        drafter,
        ENOUGH,
    ),
    Rule("execution_eager", BRANCH, "Steps run kernel by kernel.", "itl_p50_ms", ("step_ms", "host_ms"), eager, ENOUGH),
    Rule(
        "steps_uncaptured",
        BRANCH,
        "The KV format keeps steps from being one call, and memory is not short.",
        "itl_p50_ms",
        ("step_ms", "kv_used_max", "preemptions"),
        uncaptured,
        ENOUGH,
    ),
    Rule(
        "host_gap",
        BRANCH,
        "The device waits for the host between steps, because the next is planned only then.",
        "itl_p50_ms",
        ("gap_ms", "step_ms", "host_ms"),
        host_gap,
        ENOUGH,
    ),
    Rule(
        "quantizer_unsuited",
        "ITL: quantizer",
        "The format of the weights is not one that this device computes with.",
        "itl_p50_ms",
        ("step_ms", "cost.base_ms"),
        quantizer,
        ENOUGH,
    ),
    Rule(
        "weights_unquantized",
        "ITL: quantizer",
        "A decode step spends most of its time reading weights.",
        "itl_p50_ms",
        ("rows", *STEP_COST),
        weights,
        ENOUGH,
    ),
    Rule(
        "long_context",
        BRANCH,
        "A decode step spends most of its time reading the keys and values of long contexts.",
        "itl_p50_ms",
        ("prompt_mean", "output_mean", "rows"),
        long_context,
        ENOUGH,
    ),
    Rule(
        "threads_set",
        BRANCH,
        "The number of CPU threads was set by hand.",
        "itl_p50_ms",
        ("step_ms", "busy_share"),
        threads,
        ENOUGH,
    ),
)
