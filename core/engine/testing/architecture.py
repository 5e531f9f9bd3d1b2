"""Conformance suite for architectures: derive a test class, name some models, and run pytest.

.. code-block:: python

    class TestMine(ArchitectureConformance):
        def make(self):
            return Mine(MineConfig())

        def models(self):
            return {"small": {"architectures": ["MineForCausalLM"], "hidden_size": 64, ...}}

        def reference(self, model):
            return MineForCausalLM(MineHFConfig(**model.raw))

``models`` are what ``config.json`` says, or a :class:`~engine.contracts.model.ModelConfig`. Where ``reference`` gives a
model of transformers, its tensors, logits and greedy tokens are compared with those of the graph; without one, weights
are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.assembly.model_config import of_text, read_config
from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.architecture import Architecture, NestedArchitecture
from engine.contracts.graph import Graph
from engine.contracts.model import ModelConfig, ModelFacts
from engine.contracts.ops import AllGather, AllReduce, Norm, ScaleBy, Slice, TorchFunction
from engine.kernels.settings import Kernels
from engine.models.checkpoint_checks import IGNORED_SUFFIXES
from engine.models.layout import Layout
from engine.models.manifest import Manifest, unread_names
from engine.models.placement import place
from engine.models.record import facts, recorded
from engine.plugin_guard.calls import lacking
from engine.testing.paged_loop import BLOCK, PagedLoop, loaded
from engine.testing.plain import PlainQuantizer, RoundedQuantizer, to_fp8, to_int4, to_int8
from engine.testing.subject import Subject, Suite, contract_suite, filled

TOKENS = 40
"""Of a sequence."""
CHUNKS = (21, 1, 1, 6, 1, 10)
"""Of them, by step: a prompt, decode steps, and chunks in between."""
NEED_ALL = (Norm, ScaleBy, Slice, TorchFunction)
"""Ops that may need all features of what ranks have a part of."""
OUTPUT = 32
"""Greedy tokens after a prompt of the others."""
ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "int8": (to_int8, 1.0), "float8": (to_fp8, 6.0), "int4": (to_int4, 24.0)
}  # fmt: skip
"""Formats that weights are rounded to, and how many times the error of int8 each may have."""
UNRELATED = 1.0
"""Logits that have nothing to do with the right ones are off by 1.4 of them."""
MOST_WEIGHTS = 50_000_000
"""Of a model that is computed: a larger one is only described."""


class ArchitectureConformance:
    """What the core relies on."""

    tolerance: ClassVar[float] = 1e-4
    """Largest accepted difference of logits in float32, as a share of the largest."""
    rounding_error: ClassVar[float] = 0.05
    """Largest accepted error of logits with weights rounded to int8: root mean square, as a share of that of the
    logits. With those of float8 and int4 it may be as many times larger as :data:`ROUNDED` says."""
    kernels: ClassVar[tuple[Kernels, ...]] = ("reference", "torch")
    """What the graph is computed by, each for itself: ops one by one, and torch's fused sequences; ``native`` are
    C++ kernels."""

    def make(self) -> Architecture:
        """The architecture under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def models(self) -> Mapping[str, ModelConfig | Mapping[str, Any]]:
        """Models that it describes, by a name: small ones, one for each thing in which the family's differ."""
        raise NotImplementedError(f"{type(self).__name__} must define models(self)")

    def reference(self, model: ModelConfig) -> Any | None:
        """The same model in transformers, with any weights, in float32; ``None``: nothing is compared."""
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model_name" in metafunc.fixturenames:
            metafunc.parametrize("model_name", list(self.models()))

    def config(self, name: str) -> ModelConfig:
        """Of one of the models; its checkpoint is nowhere."""
        given = self.models()[name]
        return given if isinstance(given, ModelConfig) else read_config(given, {}, "/nowhere", name)

    def text(self, name: str) -> ModelConfig:
        """:meth:`config`, or its part for text."""
        model, architecture = self.config(name), self.make()
        if isinstance(architecture, NestedArchitecture):
            return of_text(model, architecture.text_config(model.raw))
        return model

    def described(self, name: str) -> tuple[ModelFacts, Graph]:
        model = self.text(name)
        return facts(self.make(), model), recorded(self.make(), model)

    # Descriptions ----------------------------------------------------------------------------------------------------

    def test_it_fulfils_the_contract(self) -> None:
        made = self.make()
        assert isinstance(made, Architecture), lacking(made, Architecture)

    def test_the_core_accepts_its_graphs(self, model_name: str) -> None:
        """A whole model: tokens in, logits out, and in between layers with attention."""
        self.described(model_name)

    def test_a_model_is_described_the_same_whenever_it_is_asked(self, model_name: str) -> None:
        """Memory is planned by one description and weights are loaded by another; drafters have models of their own."""
        model, architecture = self.text(model_name), self.make()
        kept = copy.deepcopy(dict(model.raw))
        first = recorded(architecture, model)
        for name in self.models():
            other = self.text(name)
            again = recorded(architecture, other)
            assert again == recorded(self.make(), other), f"{name}, described after {model_name}"
        assert recorded(architecture, model) == first == recorded(self.make(), model)
        assert dict(model.raw) == kept, "the configuration was changed"

    def test_a_description_touches_no_tensor_and_no_file(self, model_name: str) -> None:
        """It is asked where there is no checkpoint yet, and before torch is needed."""
        model, architecture = replace(self.text(model_name), path="/nowhere"), self.make()
        with _NoTensors():  # type: ignore[no-untyped-call]
            recorded(architecture, model)

    def test_every_tensor_has_a_name_of_its_own(self, model_name: str) -> None:
        """Two ops that read one tensor are a slip, and the other's tensor would be left over."""
        names = [name for name, _ in tensors_of(self.described(model_name)[1])]
        assert all(name and not name.startswith(".") for name in names)
        assert sorted(set(names)) == sorted(names), f"named twice: {[n for n in names if names.count(n) > 1][:3]}"

    def test_cuts_for_tensor_parallelism_fit_together(self, model_name: str) -> None:
        """What a linear layer with ``shard="out"`` makes is shared out over ranks, and one with ``shard="in"`` takes it
        so: each layer ends in sums, and what ranks have a part of is gathered only for ops that need all of it."""
        for rank in place(self.described(model_name)[1], Layout(tp=2), lambda spec, axis: 1):
            for layer in rank.graph.layers:
                ops = {node.outputs[0]: node.op for node in layer.nodes if node.outputs}
                assert any(isinstance(op, AllReduce) for op in ops.values())
                for node in layer.nodes:
                    gathered = any(isinstance(ops.get(value), AllGather) for value in node.inputs)
                    assert not gathered or isinstance(node.op, NEED_ALL), f"{type(node.op).__name__} of gathered values"

    # Against the reference -------------------------------------------------------------------------------------------

    def test_tensors_are_those_of_the_reference(self, model_name: str) -> None:
        with self.checkpoint(model_name) as (model, graph, theirs):
            if theirs is None:
                return
            stored = open_checkpoint(model.path)
            ours = dict(tensors_of(graph, stored.names))
            assert ours.keys() - stored.names == set(), "the reference has no such tensors"
            _, optional = Manifest(names=stored.names).expected_names(graph)
            others = stored.names - ours.keys() - optional - unread_names(graph, stored.names)
            left = {name for name in others if not name.endswith(IGNORED_SUFFIXES)}
            assert left == set(), "no op reads these tensors of the reference"
            assert ours == {name: stored.entry(name).shape for name in ours}

    def test_logits_are_those_of_the_reference(self, model_name: str) -> None:
        """With random weights, norms and biases included."""
        with self.checkpoint(model_name) as (model, graph, theirs):
            if theirs is None:
                return
            tokens = _tokens(model)
            want = _logits_of(theirs, tokens)
            for kernels in self.kernels:
                loop = self.loop(model, graph, kernels)
                (got,) = loop.logits([(loop.add(), tokens)])
                self._assert_equal(got, want, f"by {kernels} kernels, ")

    def test_greedy_tokens_are_those_of_the_reference(self, model_name: str) -> None:
        with self.checkpoint(model_name) as (model, graph, theirs):
            if theirs is None:
                return
            prompt = _tokens(model)[: TOKENS - OUTPUT]
            got = self.loop(model, graph).greedy(prompt, OUTPUT)
            # The reference says in one pass what it would have chosen after each token of this answer.
            want = _logits_of(theirs, [*prompt, *got]).argmax(dim=-1).tolist()[len(prompt) - 1 : -1]
            assert got == want

    # Against itself --------------------------------------------------------------------------------------------------

    def test_chunks_and_decode_steps_give_the_logits_of_the_whole(self, model_name: str) -> None:
        with self.computed(model_name) as (loop, tokens, want):
            sequence, start = loop.add(), 0
            for count in CHUNKS:
                chunk = slice(start, start + count)
                (got,) = loop.logits([(sequence, tokens[chunk])])
                self._assert_equal(got, want[chunk], f"of {count} tokens after {start}, ")
                start += count
            assert start == TOKENS

    def test_neighbours_in_a_batch_do_not_change_a_row(self, model_name: str) -> None:
        with self.computed(model_name) as (loop, tokens, want):
            first, second, third = loop.add(), loop.add(), loop.add()
            loop.logits([(second, tokens[5:25]), (third, tokens[:12])])
            _, got, after = loop.logits([(second, tokens[1:4]), (first, tokens), (third, tokens[12:13])])
            self._assert_equal(got, want)
            self._assert_equal(after, want[12:13])

    def test_a_cached_prefix_gives_the_logits_of_a_cold_start(self, model_name: str) -> None:
        """At the end of a block and inside of one, which is copied then."""
        with self.computed(model_name) as (loop, tokens, want):
            cached = loop.add()
            loop.logits([(cached, tokens)])
            for length in (2 * BLOCK, 2 * BLOCK + 3):
                (got,) = loop.logits([(loop.continued(cached, length), tokens[length:])])
                self._assert_equal(got, want[length:], f"after {length} cached tokens, ")

    def test_rejected_drafts_change_nothing(self, model_name: str) -> None:
        with self.computed(model_name) as (loop, tokens, want):
            sequence, drafts = loop.add(), tokens[3:7]
            loop.logits([(sequence, tokens[:20])])
            loop.logits([(sequence, [tokens[20], *drafts])])
            loop.lengths[sequence] = 21
            (got,) = loop.logits([(sequence, tokens[21:])])
            self._assert_equal(got, want[21:])

    def test_rounded_weights_change_little(self, model_name: str) -> None:
        """To int8, float8 and int4: what is rounded are weights of linear layers and experts, and nothing beside."""
        with self.checkpoint(model_name) as (model, graph, _):
            want = self._rounded_logits(model, graph, PlainQuantizer())
            for name, (rounded, times) in ROUNDED.items():
                got = self._rounded_logits(model, graph, RoundedQuantizer(rounded))
                error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
                most = min(times * self.rounding_error, UNRELATED)
                assert 0.0 < error <= most, f"{name}: an error of {error:.1e} of the logits, expected at most {most:g}"

    # -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def checkpoint(self, name: str) -> Iterator[tuple[ModelFacts, Graph, Any]]:
        """One of the models with random weights in a folder, and the reference if there is one."""
        model, graph = self.described(name)
        num_weights = sum(prod(shape) for _, shape in tensors_of(graph))
        if num_weights > MOST_WEIGHTS:
            pytest.skip(f"{num_weights / 1e6:.0f} million weights: set model.path to a model of at most 50 million")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            theirs = self.reference(self.config(name))
        generator = torch.Generator().manual_seed(11)
        with TemporaryDirectory() as folder:
            if theirs is None:
                weights = {name: _random(shape, generator) for name, shape in tensors_of(graph)}
                save_file(weights, Path(folder) / "model.safetensors")
            else:
                with torch.no_grad():
                    for parameter in theirs.eval().float().parameters():
                        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
                theirs.save_pretrained(folder)
            model = replace(model, path=folder)
            yield model, recorded(self.make(), model), theirs

    @contextmanager
    def computed(self, name: str) -> Iterator[tuple[PagedLoop, list[int], Tensor]]:
        """One of the models, a prompt, and its logits when it is computed at once and alone."""
        with self.checkpoint(name) as (model, graph, _):
            loop, tokens = self.loop(model, graph), _tokens(model)
            (logits,) = loop.logits([(loop.add(), tokens)])
            yield loop, tokens, logits

    def _rounded_logits(self, model: ModelFacts, graph: Graph, quantizer: PlainQuantizer) -> Tensor:
        loop = PagedLoop(loaded(model, graph, quantizer=quantizer))
        return loop.logits([(loop.add(), _tokens(model))])[0]

    def loop(self, model: ModelFacts, graph: Graph, kernels: Kernels | None = None) -> PagedLoop:
        return PagedLoop(loaded(model, graph, kernels or self.kernels[-1]))

    def _assert_equal(self, got: Tensor, want: Tensor, where: str = "") -> None:
        gap = float((got - want).abs().max() / want.abs().max())
        assert gap <= self.tolerance, f"{where}logits differ by {gap:.1e} of the largest"


class _NoTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"describe() computes {func}")


def tensors_of(graph: Graph, names: Container[str] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a graph reads of an unquantized checkpoint that has ``names``."""
    for tensor in Manifest(names=names).tensors(graph):
        assert tensor.shape is not None
        yield tensor.name, tensor.shape


def _tokens(model: ModelFacts) -> list[int]:
    """A prompt."""
    generator = torch.Generator().manual_seed(5)
    tokens: list[int] = torch.randint(0, model.vocab_size, (TOKENS,), generator=generator).tolist()
    return tokens


@torch.no_grad()
def _logits_of(theirs: Any, tokens: Sequence[int]) -> Tensor:
    """Of each token, by a model of transformers."""
    logits: Tensor = theirs(torch.tensor([tokens])).logits[0]
    assert bool(logits.isfinite().all()), "the reference's logits are not finite"
    return logits


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A weight, of which a product is about as large as its input; of a norm, about 1."""
    noise = torch.randn(shape, generator=generator)
    return 1.0 + 0.3 * noise if len(shape) < 2 else noise * shape[-1] ** -0.5


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    model = subject.trial.model
    if model is None:
        return contract_suite(subject, "no model to describe: set model.path=DIR to one that the plugin computes")
    models = {model.name: model}
    return filled(subject, [ArchitectureConformance], make=lambda self: subject.build(), models=lambda self: models)
