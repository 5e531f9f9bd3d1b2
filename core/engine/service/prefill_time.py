"""How long an engine computes on prompts, by what its steps cost."""

from __future__ import annotations

from engine.contracts.step_cost import StepCost, StepWork

STEP_TOKENS = 512
"""Prompt tokens of a step that is assumed, at most: more are hardly quicker, and further from what was measured
where prompts are short."""


def prefill_s(cost: StepCost | None, tokens: int, token_budget: int) -> float | None:
    """Seconds that so many prompt tokens take, in steps of at most ``token_budget``, of which nothing else takes a
    part. ``None``: nothing was measured yet."""
    if tokens <= 0:
        return 0.0
    if cost is None or cost.num_samples == 0:
        return None
    size = min(token_budget, STEP_TOKENS)
    steps, rest = divmod(tokens, size)
    return steps * _step_s(cost, size) + (_step_s(cost, rest) if rest else 0.0)


def prefill_tokens_per_s(cost: StepCost | None, token_budget: int) -> float | None:
    """Prompt tokens a second in such steps; ``None``: nothing was measured yet."""
    if cost is None or cost.num_samples == 0:
        return None
    size = min(token_budget, STEP_TOKENS)
    seconds = _step_s(cost, size)
    return size / seconds if seconds > 0.0 else None


def _step_s(cost: StepCost, tokens: int) -> float:
    return (cost.ms(StepWork.chunk(tokens)) + cost.gap_ms) / 1e3
