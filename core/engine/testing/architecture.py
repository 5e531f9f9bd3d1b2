"""Conformance suite for architectures: derive a test class, name some models, and run pytest.

.. code-block:: python

    class TestMine(ArchitectureConformance):
        def make(self):
            return Mine(MineConfig(), build_context())

        def models(self):
            return {"small": {"architectures": ["MineForCausalLM"], "hidden_size": 64, ...}}

        def reference(self, model):
            return MineForCausalLM(MineHFConfig(**model.raw))

``models`` are what ``config.json`` says, or :class:`~engine.contracts.model.ModelFacts`. Where ``reference`` gives a
model of transformers, its tensors and logits are compared with those of the ops.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.assembly.model_facts import facts_from_config
from engine.contracts.architecture import Architecture
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.model import ModelFacts
from engine.contracts.ops import (
    Attention,
    DownResidual,
    LinearSpec,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    NormSpec,
    OutResidual,
)
from engine.kernels.loading import load_model
from engine.kernels.model import ForwardBatch
from engine.kv.cache import KVCache
from engine.models.required_tensors import IGNORED_SUFFIXES, linear_of, op_norms
from engine.testing.attention_cases import PlainFormat
from engine.testing.plain import OneRank, PlainAttention, PlainQuantizer

BLOCK = 8
CHUNKS = (21, 1, 1, 6, 1)
"""Tokens by step: a prompt, decode steps, and a chunk in between."""


class ArchitectureConformance:
    """What the core relies on."""

    tolerance: ClassVar[float] = 1e-4
    """Largest accepted difference of logits in float32, as a share of the largest."""

    def make(self) -> Architecture:
        """The architecture under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def models(self) -> Mapping[str, ModelFacts | Mapping[str, Any]]:
        """Models that it describes, by a name: small ones, one for each thing in which the family's differ."""
        raise NotImplementedError(f"{type(self).__name__} must define models(self)")

    def reference(self, model: ModelFacts) -> Any | None:
        """The same model in transformers, with any weights, in float32; ``None``: nothing is compared."""
        return None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model_name" in metafunc.fixturenames:
            metafunc.parametrize("model_name", list(self.models()))

    def facts(self, name: str) -> ModelFacts:
        """Of one of the models; its checkpoint is nowhere."""
        given = self.models()[name]
        return given if isinstance(given, ModelFacts) else facts_from_config(given, {}, "/nowhere", name)

    def described(self, name: str) -> tuple[ModelFacts, ModelOps]:
        model = self.facts(name)
        return model, self.make().describe(model)

    def test_it_fulfils_the_contract(self) -> None:
        assert isinstance(self.make(), Architecture)

    def test_a_model_is_described_the_same_whenever_it_is_asked(self, model_name: str) -> None:
        """Memory is planned by one description and weights are loaded by another; drafters have models of their own."""
        model, architecture = self.facts(model_name), self.make()
        kept = copy.deepcopy(dict(model.raw))
        first = architecture.describe(model)
        assert isinstance(first, ModelOps)
        for name in self.models():
            other = self.facts(name)
            assert architecture.describe(other) == self.make().describe(other), f"{name}, described after {model_name}"
        assert architecture.describe(model) == first == self.make().describe(model)
        assert dict(model.raw) == kept, "the configuration was changed"
        assert isinstance(first.layers, tuple) and all(isinstance(layer, tuple) for layer in first.layers)

    def test_a_description_touches_no_tensor_and_no_file(self, model_name: str) -> None:
        """It is asked where there is no checkpoint yet, and before torch is needed."""
        model, architecture = replace(self.facts(model_name), path="/nowhere"), self.make()
        with _NoTensors():  # type: ignore[no-untyped-call]
            architecture.describe(model)

    def test_layers_are_those_of_the_model(self, model_name: str) -> None:
        model, ops = self.described(model_name)
        assert len(ops.layers) == model.num_layers
        for index, layer in enumerate(ops.layers):
            kinds = [type(op) for op in layer]
            assert kinds.count(Attention) == kinds.count(NormQKVRopeWrite) == 1, f"layer {index}: {kinds}"
            assert kinds.index(NormQKVRopeWrite) < kinds.index(Attention) < kinds.index(OutResidual), f"layer {index}"
            assert kinds.index(NormGateUpAct) < kinds.index(DownResidual), f"layer {index}"

    def test_attention_has_the_heads_and_windows_of_the_model(self, model_name: str) -> None:
        """The cache and its blocks are made for them."""
        model, ops = self.described(model_name)
        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        for layer, window in zip(ops.layers, model.layer_windows, strict=True):
            for op in layer:
                if isinstance(op, (NormQKVRopeWrite, Attention)):
                    assert (op.num_heads, op.num_kv_heads, op.head_dim) == heads
                if isinstance(op, Attention):
                    assert op.window == window and op.scale > 0.0
                    assert op.soft_cap is None or op.soft_cap > 0.0

    def test_linear_layers_have_the_widths_of_the_model(self, model_name: str) -> None:
        model, ops = self.described(model_name)
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden, inner = model.hidden_size, model.intermediate_size
        want = {
            NormQKVRopeWrite: (hidden, (q, kv, kv), "out", "body"),
            OutResidual: (q, (hidden,), "in", "body"),
            NormGateUpAct: (hidden, (inner, inner), "out", "gate_up"),
            DownResidual: (inner, (hidden,), "in", "body"),
        }
        for layer in ops.layers:
            for op in layer:
                if (spec := linear_of(op)) is not None:
                    assert _shape_of(spec) == want[type(op)], f"{type(op).__name__} of {spec.parts[0].name}"

    def test_embedding_and_head_are_as_the_model_says(self, model_name: str) -> None:
        model, ops = self.described(model_name)
        assert (ops.embed.vocab_size, ops.embed.hidden_size) == (model.vocab_size, model.hidden_size)
        assert _shape_of(ops.head.head) == (model.hidden_size, (model.vocab_size,), "out", "head")
        assert ops.head.tied == model.tie_embeddings

    def test_every_tensor_has_a_name_of_its_own(self, model_name: str) -> None:
        """Two layers that read one tensor are a slip, and the other's tensor would be left over."""
        _, ops = self.described(model_name)
        names = [name for name, _ in tensors_of(ops)]
        assert all(name and not name.startswith(".") for name in names)
        assert sorted(set(names)) == sorted(names), f"named twice: {[n for n in names if names.count(n) > 1][:3]}"
        norms = [norm for layer in ops.layers for op in layer for norm, _ in op_norms(op)] + [ops.head.norm]
        assert all(isinstance(norm, NormSpec) and 0.0 < norm.eps < 1.0 for norm in norms)

    def test_tensors_are_those_of_the_reference(self, model_name: str) -> None:
        model, ops = self.described(model_name)
        theirs = self.reference(model)
        if theirs is None:
            return
        ours = dict(tensors_of(ops))
        want = {name: tuple(tensor.shape) for name, tensor in _weights_of(theirs, ops).items()}
        assert ours.keys() - want.keys() == set(), "the reference has no such tensors"
        assert want.keys() - ours.keys() == set(), "no op reads these tensors of the reference"
        assert ours == want

    def test_logits_are_those_of_the_reference(self, model_name: str) -> None:
        """With random weights, norms and biases included, over a prompt, decode steps and a chunk."""
        model, ops = self.described(model_name)
        theirs = self.reference(model)
        if theirs is None:
            return
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in theirs.eval().float().parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            tokens = torch.randint(0, model.vocab_size, (sum(CHUNKS),), generator=generator)
            want = theirs(tokens[None]).logits[0]
        with tempfile.TemporaryDirectory() as folder:
            weights = {name: tensor.contiguous() for name, tensor in _weights_of(theirs, ops).items()}
            save_file(weights, Path(folder) / "model.safetensors")
            got = _logits(replace(model, path=folder), ops, tokens)
        gap = float((got - want).abs().max()) / float(want.abs().max())
        assert gap <= self.tolerance, f"logits differ by {gap:.1e} of the largest"


class _NoTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"describe() computes {func}")


def tensors_of(ops: ModelOps) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the ops read of an unquantized checkpoint."""
    yield f"{ops.embed.name}.weight", (ops.embed.vocab_size, ops.embed.hidden_size)
    for layer in ops.layers:
        for op in layer:
            yield from ((f"{norm.name}.weight", (size,)) for norm, size in op_norms(op))
            spec = linear_of(op)
            yield from () if spec is None else _linear_tensors(spec)
    yield f"{ops.head.norm.name}.weight", (ops.embed.hidden_size,)
    if not ops.head.tied:
        yield from _linear_tensors(ops.head.head)


def _linear_tensors(spec: LinearSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in spec.parts:
        yield f"{part.name}.weight", (part.out_features, spec.in_features)
        if part.bias:
            yield f"{part.name}.bias", (part.out_features,)


def _shape_of(spec: LinearSpec) -> tuple[int, tuple[int, ...], str, str]:
    return spec.in_features, tuple(part.out_features for part in spec.parts), spec.shard, spec.kind


def _weights_of(theirs: Any, ops: ModelOps) -> dict[str, Tensor]:
    """Those of a transformers model, less what follows from others."""
    shared = {f"{part.name}.weight" for part in ops.head.head.parts} if ops.head.tied else set()
    state: dict[str, Tensor] = theirs.state_dict()
    return {
        name: tensor for name, tensor in state.items() if name not in shared and not name.endswith(IGNORED_SUFFIXES)
    }


def _logits(model: ModelFacts, ops: ModelOps, tokens: Tensor) -> Tensor:
    """Of every token, float32 ``[len(tokens), vocab]``, in steps of :data:`CHUNKS` tokens with plain plugins."""
    quantizer, attention, parallelism = PlainQuantizer(), PlainAttention(), OneRank()
    loaded = load_model(
        model, ops, quantizer, attention, PlainFormat(), parallelism, "float32", "cpu", kernels="reference"
    )
    num_blocks = -(-len(tokens) // BLOCK) + 1
    kv = KVCache(model, PlainFormat(), num_blocks, BLOCK, "float32", "cpu")
    order = torch.arange(num_blocks - 1, 0, -1)
    logits, first = [], 0
    for count in CHUNKS:
        batch = _step(tokens, first, count, order)
        logits.append(loaded.head(loaded.forward(batch, kv)[0]))
        first += count
    return torch.cat(logits).float()


def _step(tokens: Tensor, first: int, count: int, blocks: Tensor) -> ForwardBatch:
    """One row of ``count`` tokens from ``first`` on, in these blocks."""
    positions = torch.arange(first, first + count)
    lengths: Sequence[int] = (first + count,)
    attention = AttentionBatch(
        q_lens=(count,),
        kv_lens=tuple(lengths),
        block_tables=blocks[None].int(),
        q_starts=torch.tensor([0, count], dtype=torch.int32),
        kv_lens_device=torch.tensor(lengths, dtype=torch.int32),
        block_size=BLOCK,
    )
    slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
    return ForwardBatch(tokens[first : first + count], positions, slots, attention, torch.zeros_like(positions))
