"""What a plan says that fits, against what an engine of that plan admits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.startup.build import build_engine
from engine_lab.shared.sizing import size_plan

from ...kernels import tiny

TOKENS, OUTPUT = 128, 15
"""A prompt of what is left takes as many blocks as the whole request."""
SHAPES = {
    "grouped heads": ({}, ()),
    "one layer": ({"layers": 1}, ("memory.fraction=0.6",)),
    "8-bit cache": ({}, ("kv_format=int8",)),
    "paged": ({}, ("kv_allocator=paged", "kv_allocator.block_size=32")),
    "drafts": ({}, ("drafter=ngram", "drafter.max_width=4")),
}


def admitted(overrides: list[str], memory: int, count: int) -> int:
    """Most requests that an engine runs at once, of so many that come together, before it preempts any."""
    core = build_engine(assemble(overrides), free=lambda device: memory).core
    rng, most = random.Random(1), 0
    for number in range(count):
        prompt = tuple(rng.choices(range(3, 120), k=TOKENS - OUTPUT))
        core.submit(EngineRequest(str(number), prompt, SamplingParams(max_tokens=OUTPUT, seed=1, ignore_eos=True)))
    while core.has_work:
        done = core.step()
        if any(isinstance(event, StepEvent) and event.preemptions for event in done.events):
            break
        most = max(most, core.stats().running)
    core.close()
    return most


@pytest.mark.parametrize("name", SHAPES)
def test_by_memory_is_what_an_engine_admits(name: str, tmp_path: Path) -> None:
    options, own = SHAPES[name]
    layers = options.get("layers", 3)
    folder = tiny.write(tmp_path, tiny.weights(layers=layers), **options)
    overrides = [f"model.path={folder}", "device=cpu", "execution=eager", "attention_kernel=torch", *own]
    overrides += ["model.max_len=256", "scheduler.token_budget=4096"]
    overrides += ["scheduler.itl_target_ms=0", "calibration=none"]
    memory = 48 * 2**20
    said = size_plan(overrides, memory=memory).by_memory(TOKENS)
    as_said, more = (
        admitted([*overrides, f"scheduler.max_requests={rows}"], memory, rows) for rows in (said, said + said // 10)
    )
    assert said > 20 and as_said >= 0.95 * said and more <= 1.05 * said
