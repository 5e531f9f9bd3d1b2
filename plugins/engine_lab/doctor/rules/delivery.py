"""Neither TTFT nor ITL of the engine: what is before and after it."""

from __future__ import annotations

from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.rule import BETWEEN, CLIENTS, Remedy, Rule

NOTICED_MS = 200.0
"""People notice a delay from here on."""
LONG_ANSWER = 800
"""Tokens: some 600 words."""


def tokenizer(engine: Engine, figures: Figures) -> Remedy | None:
    """Waiting for it is included."""
    share = figures["tokenize_ms"] / (
        figures["tokenize_ms"] + figures["queue_ms"] + figures["prefill_ms"] + figures["dispatch_ms"]
    )
    if figures["tokenize_ms"] < 4.0 or share < 0.3:
        return None
    advice = "Send token ids (/v1/completions takes a list), or shorter prompts; count tokens (/tokenize) elsewhere."
    return Remedy(max(0.05, 1.0 - share), 1.0 - 0.3 * share, (), advice)


def slow_client(engine: Engine, figures: Figures) -> Remedy | None:
    """What the server waits for, or, of answers that fit into the system's buffers, what lies there unread."""
    unread = figures.get("unread_ms", 0.0)
    waits = figures["writing_ms"] >= max(NOTICED_MS, 0.5 * figures["decode_ms"])
    if not waits and unread < max(50.0, 0.05 * figures["decode_ms"]):
        return None
    advice = "The client (or a proxy before it) does not read as fast as tokens come: no setting of the engine helps."
    return Remedy(0.1, 0.8, (), advice)


def buffered(engine: Engine, figures: Figures) -> Remedy | None:
    """Tokens that the engine makes one by one arrive together."""
    first, decode = figures["probe_first_ms"], figures["probe_decode_ms"]
    if decode < 20.0 or figures["probe_spread_ms"] > 0.3 * decode or first < 0.9 * decode:
        return None
    advice = (
        "What is between clients and the server collects a stream before it passes it on: switch buffering and "
        "compression of text/event-stream off there (nginx: proxy_buffering off). The longer an answer, the worse."
    )
    return Remedy(max(0.0, 1.0 - 1.2 * decode / first), 1.0 - 0.4 * min(1.0, decode / first), (), advice)


def to_the_limit(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["length_share"] < 0.8 or figures["output_mean"] < LONG_ANSWER:
        return None
    if figures["decode_ms"] < 0.7 * figures["e2e_mean_ms"]:
        return None
    advice = "Ask for what a reader needs: a max_tokens of what the longest useful answers have, or stop sequences."
    return Remedy(0.1, 0.9, (), advice)


def not_streamed(engine: Engine, figures: Figures) -> Remedy | None:
    if figures["stream_share"] > 0.1 or figures["first_text_ms"] < NOTICED_MS:
        return None
    ratio = figures["ttft_p50_ms"] / figures["first_text_ms"]
    if ratio > 0.6:
        return None
    advice = 'Ask with "stream": true: the first token is there when the answer is still being computed.'
    return Remedy(0.5 * ratio, min(0.9, 1.5 * ratio), (), advice, change="stream")


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
        ("writing_ms", "unread_ms", "decode_ms"),
        slow_client,
        {"requests": 3.0},
        where=CLIENTS,
    ),
    Rule(
        "proxy_buffers",
        "neither: delivery",
        "Answers are streamed by the server and arrive as a whole: something between it and --url collects them.",
        "probe_first_ms",
        ("probe_spread_ms", "probe_decode_ms"),
        buffered,
        where=BETWEEN,
    ),
    Rule(
        "answers_reach_limit",
        "neither: max_tokens realistic?",
        "Answers are long and end only at max_tokens: nearly all of E2E is tokens that nobody ended.",
        "e2e_mean_ms",
        ("length_share", "output_mean", "decode_ms"),
        to_the_limit,
        {"requests": 3.0},
        where=CLIENTS,
    ),
    Rule(
        "not_streamed",
        "neither: streaming on?",
        "Answers are sent whole, so that nobody sees anything before the end.",
        "first_text_ms",
        ("stream_share", "ttft_p50_ms"),
        not_streamed,
        {"requests": 3.0},
        where=CLIENTS,
    ),
    Rule(
        "clients_leave",
        "neither: clients",
        "Clients close their connections before answers end.",
        "aborted",
        ("aborted", "requests"),
        clients_leave,
        {"requests": 1.0},
        where=CLIENTS,
    ),
)
