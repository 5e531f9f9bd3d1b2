"""The first requests, before anybody's: kernels are loaded, compiled and tuned when they are first used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore


def warm_up(core: EngineCore, max_len: int, token_budget: int, max_requests: int, on_gpu: bool) -> None:
    """Run requests of different shapes, so that the first real one meets warm kernels.

    On a GPU every kind of launch must have been made: kernels are compiled when they are first launched, and nothing
    may be compiled once the engine is ready.
    """
    greedy = {"temperature": 0.0}
    if not on_gpu:
        _run_together(core, [max(min(max_len - 8, 256), 1)], 2, greedy)
        for _ in range(2):
            _run_together(core, [1], 4, greedy)
    else:
        longest = max(min(max_len - 8, token_budget), 1)
        lengths = [1 << i for i in range(longest.bit_length() - 1)] + [longest]
        for length in lengths:
            _run_together(core, [length], 2, greedy)
        _run_together(core, [*lengths[: max_requests - 1], 1], 4, greedy)
        _run_together(core, [min(17, longest)] * max_requests, 4, greedy)
        sampled = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2, "seed": 1, "repetition_penalty": 1.1}
        for settings in ({}, sampled):
            _run_together(core, [1] * min(2, max_requests), 3, settings)


def _run_together(core: EngineCore, prompts: Sequence[int], outputs: int, settings: Mapping[str, Any]) -> None:
    """Requests with prompts of so many tokens, submitted at once, to their end."""
    for i, length in enumerate(prompts):
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, **settings)
        core.submit(EngineRequest(f"warm-up-{i}", tuple([0] * length), sampling, cache_salt=f"warm-up-{i}"))
    while core.has_work:
        for output in core.step().outputs:
            if output.error:
                raise RuntimeError(f"warm-up failed: {output.error}")
    core.reset_prefix_cache()
