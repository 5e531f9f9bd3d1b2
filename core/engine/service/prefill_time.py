"""How long an engine computes on prompts, by what its steps cost."""

from __future__ import annotations

from engine.contracts.step_cost import StepCost, StepWork


def prefill_s(cost: StepCost | None, tokens: int, token_budget: int) -> float | None:
    """Seconds that so many prompt tokens take, in steps of at most ``token_budget``, of which nothing else takes a
    part. Steps larger than any that was measured are not assumed. ``None``: nothing was measured yet."""
    if tokens <= 0:
        return 0.0
    if (size := _step_tokens(cost, token_budget)) is None or cost is None:
        return None
    steps, rest = divmod(tokens, size)
    return steps * _step_s(cost, size) + (_step_s(cost, rest) if rest else 0.0)


def prefill_tokens_per_s(cost: StepCost | None, token_budget: int) -> float | None:
    """Prompt tokens a second in such steps; ``None``: nothing was measured yet."""
    if (size := _step_tokens(cost, token_budget)) is None or cost is None:
        return None
    seconds = _step_s(cost, size)
    return size / seconds if seconds > 0.0 else None


def _step_tokens(cost: StepCost | None, token_budget: int) -> int | None:
    return None if cost is None or cost.num_samples == 0 else max(1, min(token_budget, cost.largest.num_tokens))


def _step_s(cost: StepCost, tokens: int) -> float:
    return (cost.ms(StepWork.chunk(tokens)) + cost.gap_ms) / 1e3
