"""What the case study that the default rungs follow says of each of them, as ratios, and where it contradicts itself.

Llama 3.1-70B in bfloat16 on two A100-80GB, a system prompt of 4,000 tokens, ``max_tokens`` 2048.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Expectation:
    """Ratios after / before by key of a figure."""

    ratios: dict[str, float]
    notes: tuple[str, ...] = field(default=())


EXPECTED = {
    "streaming": Expectation({"output_p50": 4.8 / 17, "ttft_p50": 1.0, "itl": 1.0}),
    "static prefix first": Expectation(
        {"ttft_p50": 0.6 / 4.8, "ttft_p95": 1.0, "itl": 1.0},
        ("0.6 s is a hit, at a hit rate of about 80 %; P95 is a prompt that was not cached.",),
    ),
    "max_tokens": Expectation(
        {"ttft_p50": 1.0, "itl": 1.0, "e2e_p50": 9.5 / 17},
        ("A limit of 350 cannot shorten answers of 300 tokens: 9.5 s would be 212 tokens.",),
    ),
    "quantizer": Expectation({"ttft_p50": 0.5 / 0.6, "ttft_p95": 4.1 / 4.8, "itl": 28 / 42}, ("There FP8.",)),
    "chunked prefill": Expectation(
        {"ttft_p50": 1.0, "ttft_p95": 3.2 / 4.1, "itl": 26 / 28},
        (
            "4.1 to 3.2 s is 22 % less, where the text says 30 %.",
            "Elsewhere chunks raise a prompt's own TTFT and lower the others' ITL.",
        ),
    ),
    "drafter": Expectation({"ttft_p50": 1.0, "ttft_p95": 1.0, "itl": 13 / 26}, ("There EAGLE3.",)),
    "all rungs": Expectation(
        {"ttft_p50": 0.5 / 4.8, "ttft_p95": 3.2 / 4.8, "itl": 13 / 42, "e2e_p50": 4.5 / 17},
        (
            "P50 as a hit, P95 as a prompt that was not cached.",
            "Its 47 users (11.8 times as many) are those of another model: of this one 2 or 3 fit, or about 23 if "
            "they share the system prompt.",
            "The baseline's TTFT is 5.3 times what its prompt takes to compute, its ITL 1.2 times what its weights "
            "take to read.",
        ),
    ),
}
"""By name of a rung. Where the case study has two values, that of a cached prompt is compared with P50."""
