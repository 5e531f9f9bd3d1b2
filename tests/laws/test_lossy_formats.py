"""Weights, keys and values in few bits with the bundled model: whatever is swapped beside a format, its tokens stay.

A format loses something, so its reference is the ``baseline`` preset with the same format, one request at a time. That
preset multiplies with torch alone, the others with the kernels for this CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine import LLM

from .test_bundled_swaps import COMMON, SETS, Outputs, assert_idle, prompts

ALONE = ("kv_format=int8", "kv_format=fp8", "quantizer=int8", "quantizer=int4")
FORMATS = (
    "quantizer=fp8",
    "quantizer=int8 kv_format=int8",
    "quantizer=int4 kv_format=fp8",
    *(pytest.param(alone, marks=pytest.mark.slow) for alone in ALONE),
)
NAMES = ("latency", "tiny chunks", "always drafting", "preempted", "static batches")
GREEDY = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module", params=FORMATS)
def engines(request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """Engines with one format, by overrides, built once."""
    built: dict[tuple[str, ...], LLM] = {}

    def get(*overrides: str) -> LLM:
        if overrides not in built:
            built[overrides] = LLM("bundled", overrides=[*COMMON, *request.param.split(), *overrides])
        return built[overrides]

    yield get
    for llm in built.values():
        llm.close()


@pytest.fixture(scope="module")
def reference(engines: Callable[..., LLM]) -> Outputs:
    llm = engines("+preset=baseline")
    return [llm.generate([prompt], **GREEDY)[0].tokens for prompt in prompts(llm, 12)]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_of_a_format_do_not_depend_on_other_plugins(
    name: str, engines: Callable[..., LLM], reference: Outputs
) -> None:
    llm = engines(*SETS[name])
    for _ in range(2):  # the second time, prefixes are cached where there is a cache
        done = llm.generate(prompts(llm, 12), **GREEDY)
        assert [completion.tokens for completion in done] == reference
    assert_idle(llm)


def test_most_tokens_are_those_of_the_unrounded_model(engines: Callable[..., LLM], reference: Outputs) -> None:
    """Rounding shows somewhere, but a format that read garbage would agree nowhere."""
    plain = LLM("bundled", overrides=[*COMMON, "+preset=baseline"])
    want = [plain.generate([prompt], **GREEDY)[0].tokens for prompt in prompts(plain, 12)]
    plain.close()
    same = sum(a == b for one, other in zip(reference, want, strict=True) for a, b in zip(one, other, strict=False))
    assert same >= 0.5 * sum(map(len, want))
