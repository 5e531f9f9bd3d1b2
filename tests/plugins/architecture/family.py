"""What tests of families share: models of transformers are the reference, and are written once for all tests of a
file."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers
from transformers import AutoConfig

from engine.assembly.model_config import of_text, read_config
from engine.contracts.architecture import Architecture, NestedArchitecture
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Graph
from engine.contracts.model import ModelConfig, ModelFacts
from engine.models.record import recorded
from engine.testing.architecture import ArchitectureConformance

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.selection import few
from tools.benchmarks.families import DRAFTERS, Row, measure

FULL, SLIDING = "full_attention", "sliding_attention"
Checkpoint = tuple[ModelFacts, Graph, Any]
WRITTEN: dict[str, Checkpoint] = {}
"""By the name of a model; in folders that last as long as :data:`FOLDERS`."""
FOLDERS = ExitStack()


@pytest.fixture(autouse=True, scope="module")
def written_once() -> Iterator[None]:
    with FOLDERS:
        yield
    WRITTEN.clear()


class Family(ArchitectureConformance):
    """Models of transformers are the reference. All are compared with it; what the engine computes in steps is compared
    for :attr:`in_steps`."""

    plugin: ClassVar[type[Any]]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]]
    in_steps: ClassVar[tuple[str, ...]]
    is_like_llama: ClassVar[bool] = False
    """Its layers are Llama's but for biases, multipliers and rotations, or those of another family of its file: what an
    engine answers is left to slow runs, and so is what comes of prefixes, drafts, neighbours and rounding."""
    answers_like: ClassVar[type[Any] | None] = None
    """The plugin of a family of the same kinds of layers, for which an engine answers in every run; for this one it
    does in slow ones."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model_name" in metafunc.fixturenames:
            function = metafunc.function.__name__
            names = list(self.models()) if function.endswith("of_the_reference") else self.in_steps
            quick, answers = names, Family.test_an_engine_answers_like_the_reference.__name__
            if function == Family.test_greedy_tokens_are_those_of_the_reference.__name__:
                quick = self.in_steps[:1]  # of the others, logits are compared
            if (self.is_like_llama and function in SAME_AS_LLAMA) or (self.answers_like and function == answers):
                quick = ()
            marked = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]
            metafunc.parametrize("model_name", marked)

    def make(self) -> Architecture:
        made: Architecture = self.plugin(SlotConfig())
        return made

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return self.variants

    def reference(self, model: ModelConfig) -> Any:
        config = AutoConfig.for_model(**copy.deepcopy(dict(model.raw)))
        return getattr(transformers, model.architecture)._from_config(config, attn_implementation="eager")

    @contextmanager
    def checkpoint(self, name: str) -> Iterator[Checkpoint]:
        if name not in WRITTEN:
            WRITTEN[name] = FOLDERS.enter_context(super().checkpoint(name))
        yield WRITTEN[name]

    @few(1)
    def test_an_engine_answers_like_the_reference(self, model_name: str) -> None:
        """In chunks, after a cached prefix, with drafts; and nearly so with weights in 8 bits. Weights take the memory
        that was planned."""
        row = Row(model_name, "", 0)
        measure(row, self, model_name)
        assert max(row.differences + row.in_chunks) <= self.tolerance
        assert row.equal == dict.fromkeys(("greedy", "cached", *DRAFTERS), 1)
        assert max(row.rounded) <= self.rounding_error
        assert row.weights_bytes == row.planned_bytes > 0


SAME_AS_LLAMA = {
    test.__name__
    for test in (
        Family.test_neighbours_in_a_batch_do_not_change_a_row,
        Family.test_a_cached_prefix_gives_the_logits_of_a_cold_start,
        Family.test_rejected_drafts_change_nothing,
        Family.test_rounded_weights_change_little,
        Family.test_an_engine_answers_like_the_reference,
    )
}
"""Tests of what follows from the kinds of weights, and from how layers read and write caches, which the logits of
chunks show, too."""


def described(plugin: type[Any], config: Mapping[str, Any], path: str = "/nowhere", **changes: Any) -> Graph:
    """By an architecture. ``changes``: of the part for text, if there is one; a value of ``...`` is a key less."""
    text = config.get("text_config")
    changed = {key: value for key, value in {**(text or config), **changes}.items() if value is not ...}
    whole = changed if text is None else {**config, "text_config": changed}
    model, architecture = read_config(whole, {}, path, "model"), plugin(SlotConfig())
    if isinstance(architecture, NestedArchitecture):
        model = of_text(model, architecture.text_config(model.raw))
    return recorded(architecture, model)
