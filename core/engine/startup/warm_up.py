"""The first requests, before anybody's: kernels are loaded, compiled and tuned when they are first used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from engine.assembly.errors import AssemblyError
from engine.contracts.request import EngineRequest, SamplingParams
from engine.kernels.model import LoweredBlock
from engine.loop.core import EngineCore
from engine.step.plan import StepRow
from engine.step.runner import ModelRunner

HEAD_ROWS = (1, 2, 17, 33, 65)
"""One for each way a linear layer has with few rows, and one beyond: see ``engine.kernels.triton.tiles``."""

WHOLE_TOKENS = 256
"""Most of a batch that runs through the whole model: more than the rows that linear layers have kernels of their own
for. So what is compiled for a layer's own tensors, for their dtypes say, is met in every layer."""


def warm_up(core: EngineCore, max_len: int) -> None:
    """Run requests of different shapes, so that the first real one meets warm kernels: of one request, every
    number of drafts among them. Raises :class:`AssemblyError` when one fails."""
    greedy = {"temperature": 0.0}
    with core.warming_up():
        _run_together(core, [max(min(max_len - 8, 256), 1)], 2, greedy)
        for outputs in (4, 4, *range(3, core.max_draft_tokens + 3)):
            _run_together(core, [1], max(1, min(outputs, max_len - 2)), greedy)


def warm_up_kernels(runner: ModelRunner, max_len: int, token_budget: int) -> None:
    """On a GPU every kind of launch must have been made before readiness: a kernel is compiled when it is first used.

    Batches of every shape, on the row that is nobody's: small ones through the whole model, large ones through a layer
    of each kind. All ranks do this at the same time, and where there are several, all batches take all layers.
    """
    layers = runner.model.layers_of_each_kind if runner.is_alone else ()
    few = layers if len(layers) < len(runner.model.layers) else ()
    for rows, length in batch_shapes(runner.tables.nobody, max_len, token_budget):
        _forward(runner, rows, length, few if rows * length > WHOLE_TOKENS else ())


def warm_up_sampling(core: EngineCore, max_len: int, token_budget: int) -> None:
    """The same for all that follows the model."""
    longest = max(min(max_len - 8, token_budget - 1), 1)  # both prompts in one step: alone, one might be captured
    filtered = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    asking = {"logprobs": 2, "seed": 1, "repetition_penalty": 1.1}
    for settings in ({"temperature": 0.0}, {}, filtered, filtered | asking):
        _run_together(core, [longest, 1], 3, settings)


def batch_shapes(max_requests: int, max_len: int, token_budget: int) -> Iterator[tuple[int, int]]:
    """``(rows, tokens per row)``: from one to ``max_requests`` rows in steps of a third or a half, each with 1, 2, 4,
    ... tokens and with as many as fit. What a kernel is compiled for changes in wider steps than these."""
    sizes = sorted({n for i in range(max_requests.bit_length()) for n in (1 << i, 3 << i)} | {max_requests})
    for rows in (n for n in sizes if n <= max_requests):
        longest = min(max_len, token_budget // rows)
        for length in sorted({1 << i for i in range(longest.bit_length())} | {longest}):
            if length > 0:
                yield rows, length


@torch.inference_mode()
def _forward(runner: ModelRunner, rows: int, length: int, layers: Sequence[LoweredBlock]) -> None:
    """``layers``: that stand for all; empty: run all."""
    batch = runner.tables.inputs((StepRow(runner.tables.nobody, 0, length),) * rows).forward
    hidden = runner.model.run_apart(layers, batch, runner.kv) if layers else runner.forward(batch)[0]
    if runner.samples:
        for count in HEAD_ROWS:
            runner.model.head(hidden[:count])


def _run_together(core: EngineCore, prompts: Sequence[int], outputs: int, settings: Mapping[str, Any]) -> None:
    """Requests with prompts of so many tokens, submitted at once, to their end."""
    for i, length in enumerate(prompts):
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, **settings)
        core.submit(EngineRequest(f"warm-up-{i}", tuple([0] * length), sampling, cache_salt=f"warm-up-{i}"))
    while core.has_work:
        for output in core.step().outputs:
            if output.error:
                raise AssemblyError([f"the engine fails its first requests: {output.error}"])
    core.reset_prefix_cache()
