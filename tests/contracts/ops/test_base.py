"""A new op: what this file has of it (the op, its kernel in torch) is all that the core needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.benchmarks.ranks import communicator
from torch import Tensor

from engine.checkpoint.files import CheckpointError
from engine.contracts.graph import Builder, Graph, Node, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Cut, LinearPart, Op, RopeFacts
from engine.contracts.ops.base import Mine, TensorShape
from engine.contracts.ops.work import OpStep, OpWork, Step, Widths
from engine.kernels.backends import fused_graph, rotations
from engine.kernels.settings import Kernel, Kernels, Lowered, Lowering, Weights
from engine.kernels.torch import ops as torch_ops
from engine.models.footprint import alive_in_a_layer, made_in_a_layer
from engine.models.fuse import Fused
from engine.models.layout import Layout
from engine.models.placement import place
from engine.models.work import held_bytes, work_of
from engine.testing import paged_loop
from engine.testing.architecture import ArchitectureConformance
from engine.testing.attention_cases import PlainFormat
from engine.testing.paged_loop import PagedLoop
from engine.testing.plain import PlainAttention
from engine.testing.ranks import Ranks, compare, logits, steps_of

HIDDEN, HEADS, INNER = 16, 6, 24


# contracts/ops/two_sided.py -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TwoSidedGate(Op):
    """``(a, b) -> share * silu(a) * b + (1 - share) * a * silu(b)``: two inputs that gate each other, head by head.
    ``{name}.share [num_heads]``."""

    name: str
    num_heads: int
    heads: Cut | None = None
    """Of one rank; ``num_heads`` is then how many it has."""

    @property
    def tensors(self) -> Iterable[TensorShape]:
        yield f"{self.name}.share", (self.num_heads if self.heads is None else self.heads.whole,)

    def parts(self, size: int) -> int:
        return self.num_heads

    def of_rank(self, node: Node, mine: Mine) -> Node:
        heads = mine(self.num_heads)
        return replace(node, op=replace(self, num_heads=heads.size, heads=heads))

    def work(self, node: Node, at: OpStep) -> OpWork:
        return OpWork("other", 4 * self.num_heads, 7.0 * at.num_tokens * at.sizes[node.outputs[0]])

    def beside(self, inputs: int) -> int:
        """Both sides, before they are added."""
        return inputs


# kernels/torch/two_sided.py -------------------------------------------------------------------------------------------


def lower_two_sided(lowering: Lowering, op: TwoSidedGate, fused: Fused[Kernel], weights: Weights) -> Lowered:
    ((name, shape),) = op.tensors
    own = slice(None) if op.heads is None else slice(op.heads.start, op.heads.stop)
    share = weights.small(name, shape)[own, None]

    def gated(context: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = (x.view(-1, op.num_heads, x.shape[1] // op.num_heads) for x in (a, b))
        silu = torch.nn.functional.silu
        return (share * silu(a) * b + (1.0 - share) * a * silu(b)).flatten(1)

    return Lowered(gated, "torch", "torch computes it")


# The test -------------------------------------------------------------------------------------------------------------


class Tiny:
    def describe(self, model: ModelConfig, b: Builder) -> None:
        b.positions(64)
        x = b.embed("embed", 32, HIDDEN)
        with b.layer(x):
            q, k, v = b.linear(b.rms_norm(x, "n", 1e-5), *(LinearPart(name, 16) for name in "qkv"), shard="out")
            a = b.attention(*b.rope(q, k, RopeFacts(), 8), v, 8)
            x = b.add(x, b.linear(a, LinearPart("o", HIDDEN), shard="in"))
            up = b.linear(x, LinearPart("left", INNER), LinearPart("right", INNER), shard="out")
            x = b.add(x, b.linear(self.between(b, *up), LinearPart("down", HIDDEN), shard="in"))
        b.lm_head(b.rms_norm(x, "last", 1e-5), "head", 32)

    def between(self, b: Builder, left: Value, right: Value) -> Value:
        return b.op(TwoSidedGate("two", HEADS), left, right, size=INNER)


class OneSided(Tiny):
    def between(self, b: Builder, left: Value, right: Value) -> Value:
        return b.gated(left, right, "silu")


class Suite(ArchitectureConformance):
    def __init__(self, architecture: type[Tiny] = Tiny) -> None:
        self.make = architecture  # type: ignore[method-assign, assignment]

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {"tiny": {"architectures": ["Tiny"]}}


@pytest.fixture(autouse=True)
def its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_ops._LOWER, TwoSidedGate, lower_two_sided)


@pytest.fixture
def graph() -> Graph:
    return Suite().described("tiny")[1]


def one_sided() -> Graph:
    return Suite(OneSided).described("tiny")[1]


def without_share(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if name != "two.share"}


def gates(graph: Graph) -> Iterator[TwoSidedGate]:
    return (node.op for node in graph.nodes if isinstance(node.op, TwoSidedGate))


@pytest.mark.parametrize("kernels", ["reference", "torch", "native"])
def test_it_computes_what_it_says(kernels: Kernels) -> None:
    """With all of the share on one side it is the usual gate."""
    found, lines = [], ()
    with Suite().checkpoint("tiny") as (model, graph, _):
        (file,) = Path(model.path).glob("*.safetensors")
        weights = load_file(file)
        for given, text in ((weights | {"two.share": torch.ones(HEADS)}, graph), (without_share(weights), one_sided())):
            save_file(given, file)
            loop = PagedLoop(paged_loop.loaded(model, text, kernels))
            found.append(loop.logits([(loop.add(), range(20))])[0])
            lines += loop.model.lowering
    torch.testing.assert_close(found[0], found[1])
    assert any("two_sided_gate" in line for line in lines)


def test_its_tensor_is_read_from_the_checkpoint(graph: Graph) -> None:
    with (
        Suite(OneSided).checkpoint("tiny") as (model, _, _),
        pytest.raises(CheckpointError, match=r"missing.*: two\.share"),
    ):
        paged_loop.loaded(model, graph)


def test_ranks_share_out_its_heads(graph: Graph) -> None:
    placed = place(graph, Layout(tp=2), lambda spec, axis: 1)
    assert [op for rank in placed for op in gates(rank.graph)] == [
        TwoSidedGate("two", 3, Cut(0, 3, HEADS)), TwoSidedGate("two", 3, Cut(3, 6, HEADS))
    ]  # fmt: skip


def test_ranks_compute_what_one_computes(graph: Graph) -> None:
    steps = steps_of([list(range(12)), list(range(5, 14))], [4, 3])
    with Suite().checkpoint("tiny") as (model, graph, _):
        want = logits(PagedLoop(paged_loop.loaded(model, graph)), steps)
        with Ranks(model, graph, Layout(tp=2), communicator) as ranks:
            found = compare(want, ranks.logits(steps))
    assert found.drift < 1e-5 and found.is_one


def test_its_work_and_weights_are_counted(graph: Graph) -> None:
    step, widths = Step(requests=3, tokens=2), Widths()
    (mine,), (other,) = (place(each, Layout(), lambda spec, axis: 1) for each in (graph, one_sided()))
    found, without = (work_of(rank, step, widths) for rank in (mine, other))
    assert found.num_bytes - without.num_bytes == 4 * HEADS
    assert found.flops - without.flops == 7 * step.num_tokens * INNER
    assert held_bytes(graph, widths) - held_bytes(one_sided(), widths) == 4 * HEADS


def test_memory_of_a_step_has_what_it_makes_on_the_way(graph: Graph) -> None:
    assert made_in_a_layer(graph) - made_in_a_layer(one_sided()) == 2 * INNER
    alive = []
    for each in (graph, one_sided()):
        lowering = Lowering("cpu", torch.float32, PlainAttention(), PlainFormat(), rotations(each))
        embed, *layers, _ = fused_graph(each, lowering)
        alive.append(alive_in_a_layer(each, embed, layers))
    assert alive[0] > alive[1]
