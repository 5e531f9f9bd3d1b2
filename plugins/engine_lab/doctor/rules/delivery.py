"""Neither TTFT nor ITL of the engine: what is before and after it."""

from __future__ import annotations

from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.rule import Remedy, Rule

NOTICED_MS = 200.0
"""People notice a delay from here on."""


def tokenizer(engine: Engine, figures: Figures) -> Remedy | None:
    """Waiting for it is included."""
    share = figures["tokenize_ms"] / (
        figures["tokenize_ms"] + figures["queue_ms"] + figures["prefill_ms"] + figures["dispatch_ms"]
    )
    if figures["tokenize_ms"] < 4.0 or share < 0.3:
        return None
    advice = "Send token ids (/v1/completions takes a list), or shorter prompts: the model is quicker than the text."
    return Remedy(max(0.05, 1.0 - share), 1.0 - 0.3 * share, (), advice)


def slow_client(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["writing_ms"] < max(NOTICED_MS, 0.5 * figures["decode_ms"]):
        return None
    advice = "The client (or a proxy before it) does not read as fast as tokens come: no setting of the engine helps."
    return Remedy(0.1, 0.8, (), advice)


def not_streamed(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["stream_share"] > 0.1 or figures["first_text_ms"] < NOTICED_MS:
        return None
    ratio = figures["ttft_p50_ms"] / figures["first_text_ms"]
    if ratio > 0.6:
        return None
    advice = 'Ask with "stream": true: the first token is there when the answer is still being computed.'
    return Remedy(0.5 * ratio, min(0.9, 1.5 * ratio), (), advice)


def clients_leave(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["aborted"] < max(3.0, 0.1 * (figures["requests"] + figures["aborted"])):
        return None
    advice = "Clients give up: raise their time-outs above the E2E seen here, or lower what they ask for."
    return Remedy(0.0, 0.95, (), advice)


RULES = (
    Rule(
        "tokenizer_slow",
        "TTFT, no long prompt: host",
        "Most of TTFT passes before the engine sees the prompt: template and tokenizer.",
        "ttft_p50_ms",
        ("tokenize_ms", "queue_ms", "prefill_ms", "dispatch_ms"),
        tokenizer,
        {"requests": 3.0},
    ),
    Rule(
        "slow_client",
        "neither: delivery",
        "The server waits for clients to read.",
        "e2e_mean_ms",
        ("writing_ms", "decode_ms"),
        slow_client,
        {"requests": 3.0},
    ),
    Rule(
        "not_streamed",
        "neither: streaming on?",
        "Answers are sent whole, so that nobody sees anything before the end.",
        "first_text_ms",
        ("stream_share", "ttft_p50_ms"),
        not_streamed,
        {"requests": 3.0},
    ),
    Rule(
        "clients_leave",
        "neither: clients",
        "Clients close their connections before answers end.",
        "aborted",
        ("aborted", "requests"),
        clients_leave,
        {"requests": 1.0},
    ),
)
