"""Weights, keys and values in few bits with the bundled model: whatever is swapped beside a format, its tokens stay.

A format loses something, so its reference is the ``baseline`` preset with the same format, one request at a time. That
preset multiplies with torch alone, the others with the kernels for this CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from engine import LLM
from tests.selection import few

from .test_bundled_swaps import COMMON, SETS, Outputs, assert_idle, prompts

CHOSEN = {
    "quantizer=fp8": ("latency", "tiny chunks", "static batches"),
    "quantizer=int8 kv_format=int8": ("latency", "preempted"),
    "quantizer=int4 kv_format=fp8": ("latency", "always drafting"),
}
"""Formats, and what is swapped beside each; ``-m slow`` runs what else there is."""
FORMATS = (*CHOSEN, "kv_format=int8", "kv_format=fp8", "quantizer=int8", "quantizer=int4")
NAMES = ("latency", "tiny chunks", "always drafting", "preempted", "static batches")
CACHED = ("latency", "tiny chunks", "always drafting")
"""Sets with a prefix cache."""
GREEDY = {"max_tokens": 12, "temperature": 0.0}


Engines = Callable[..., LLM]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Engines by format and further overrides, built once."""
    built: dict[tuple[str, ...], LLM] = {}

    def get(form: str, *overrides: str) -> LLM:
        if (form, *overrides) not in built:
            built[form, *overrides] = LLM("bundled", overrides=[*COMMON, *form.split(), *overrides])
        return built[form, *overrides]

    yield get
    for llm in built.values():
        llm.close()


@pytest.fixture(scope="module")
def reference(engines: Engines) -> Callable[[str], Outputs]:
    @cache
    def outputs(form: str) -> Outputs:
        llm = engines(form, "+preset=baseline")
        return [llm.generate([prompt], **GREEDY)[0].tokens for prompt in prompts(llm, 6)]

    return outputs


def case(form: str, *name: str) -> Any:
    chosen = form in CHOSEN and set(name) <= set(CHOSEN[form])
    return pytest.param(form, *name, marks=() if chosen else pytest.mark.slow)


@few(1)
@pytest.mark.parametrize(("form", "name"), [case(form, name) for form in FORMATS for name in NAMES])
def test_greedy_tokens_of_a_format_do_not_depend_on_other_plugins(
    form: str, name: str, engines: Engines, reference: Callable[[str], Outputs]
) -> None:
    llm = engines(form, *SETS[name])
    for _ in range(2 if name in CACHED else 1):  # the second time, prefixes are cached
        done = llm.generate(prompts(llm, 6), **GREEDY)
        assert [completion.tokens for completion in done] == reference(form)
    assert_idle(llm)


@few(1)
@pytest.mark.parametrize("form", [case(form) for form in FORMATS])
def test_most_tokens_are_those_of_the_unrounded_model(form: str, reference: Callable[[str], Outputs]) -> None:
    """Rounding shows somewhere, but a format that read garbage would agree nowhere."""
    both = list(zip(reference(form), reference(""), strict=True))
    same = sum(a == b for one, other in both for a, b in zip(one, other, strict=False))
    assert same >= 0.5 * sum(len(other) for _, other in both)
