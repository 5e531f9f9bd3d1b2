"""Functions of torch in an architecture: what no other op computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.files import CheckpointError
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import LinearPart, RopeFacts, TorchFunction
from engine.contracts.ops.function import FUNCTION_RESULTS
from engine.kernels.backends import fused_graph, rotations
from engine.kernels.checks.function import tried
from engine.kernels.model import LoweredModel
from engine.kernels.settings import Kernels, Lowering
from engine.models.footprint import alive_in_a_layer
from engine.plugin_guard.calls import PluginError, describe_error
from engine.testing import paged_loop
from engine.testing.architecture import ArchitectureConformance, tensors_of
from engine.testing.attention_cases import PlainFormat
from engine.testing.paged_loop import PagedLoop
from engine.testing.plain import PlainAttention

TOKENS = list(range(20))
Between = Callable[[Builder, Value], Value]


class Tiny:
    """An MLP without a gate after attention; ``between`` is what lies between its projections."""

    def __init__(self, between: Between) -> None:
        self._between = between

    def describe(self, model: ModelConfig, b: Builder) -> None:
        b.positions(64)
        x = b.embed("embed", 32, 16)
        with b.layer(x):
            q, k, v = b.linear(b.rms_norm(x, "n", 1e-5), *(LinearPart(name, 16) for name in "qkv"), shard="out")
            a = b.attention(*b.rope(q, k, RopeFacts(), 8), v, 8)
            x = b.add(x, b.linear(a, LinearPart("o", 16), shard="in"))
            up = self._between(b, b.linear(x, LinearPart("up", 24), shard="out"))
            x = b.add(x, b.linear(up, LinearPart("down", 16), shard="in"))
        b.lm_head(b.rms_norm(x, "last", 1e-5), "head", 32)


def squared(x: Tensor) -> Tensor:
    return x.relu().square()


def function(path: str, **options: Any) -> Between:
    return lambda b, up: b.torch_function(f"{__name__}:{path}", up, size=up.size, **options)


class Suite(ArchitectureConformance):
    def __init__(self, between: Between) -> None:
        self.make = lambda: Tiny(between)  # type: ignore[method-assign]

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {"tiny": {"architectures": ["Tiny"]}}


AS_OP = Suite(lambda b, up: b.activation(up, "relu2"))
AS_FUNCTION = Suite(function("squared", by_feature=True))


def loaded(suite: Suite, kernels: Kernels = "torch") -> LoweredModel:
    with suite.checkpoint("tiny") as (model, graph, _):
        return paged_loop.loaded(model, graph, kernels)


@pytest.mark.parametrize("kernels", ["reference", "torch", "native"])
def test_a_function_computes_what_an_op_with_the_same_meaning_does(kernels: Kernels) -> None:
    found = []
    for suite in (AS_OP, AS_FUNCTION):
        with suite.checkpoint("tiny") as (model, graph, _):
            loop = PagedLoop(paged_loop.loaded(model, graph, kernels))
            found.append(loop.logits([(loop.add(), TOKENS)])[0])
    torch.testing.assert_close(found[1], found[0])


def test_the_plan_names_it_and_says_that_steps_are_no_programs() -> None:
    assert "torch_function: torch function squared, unfused" in loaded(AS_FUNCTION).lowering
    native = loaded(AS_FUNCTION, "native").lowering
    assert "torch_function: torch function squared, unfused" in native
    assert any(line.startswith("steps: run uncaptured (slower): ") for line in native)


def test_its_tensors_are_those_of_the_checkpoint() -> None:
    suite = Suite(function("shifted", tensors={"shift": (24,), "by": ()}))
    _, graph = suite.described("tiny")
    assert dict(tensors_of(graph)).items() >= {"shift": (24,), "by": ()}.items()
    assert loaded(suite).weights_bytes - loaded(AS_OP).weights_bytes == (24 + 1) * 4
    missing = Suite(function("shifted", tensors={"shift": (24,), "by": ()}))
    with AS_OP.checkpoint("tiny") as (model, _, _), pytest.raises(CheckpointError, match=r"missing .*: by, shift"):
        paged_loop.loaded(model, missing.described("tiny")[1])


def shifted(x: Tensor, shift: Tensor, by: Tensor) -> Tensor:
    return x + by * shift


def test_its_own_results_are_counted_as_memory_of_a_step() -> None:
    found = []
    for suite in (AS_OP, AS_FUNCTION):
        _, graph = suite.described("tiny")
        lowering = Lowering("cpu", torch.float32, PlainAttention(), PlainFormat(), rotations(graph))
        embed, *layers, _ = fused_graph(graph, lowering)
        found.append(alive_in_a_layer(graph, embed, layers))
    assert found[1] >= max(found[0], FUNCTION_RESULTS * 24)


def number(x: Tensor) -> float:
    return 1.0


def halved(x: Tensor) -> Tensor:
    return x[:, ::2].contiguous()


def same(x: Tensor) -> Tensor:
    return x


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


def of_all_tokens(x: Tensor) -> Tensor:
    return x - x.mean(dim=0)


def of_all_features(x: Tensor) -> Tensor:
    return x.softmax(dim=1)


def fails(x: Tensor) -> Tensor:
    raise RuntimeError("not today")


NO_FUNCTION = 7

BROKEN: dict[str, str] = {
    "number": "returned 1.0, expected a tensor",
    "halved": "returned float32 [3, 4] on cpu, expected contiguous float32 [3, 8] on cpu",
    "same": "returned memory that is in use, expected new memory",
    "in_place": "changed its input",
    "of_all_tokens": "does not compute each token by itself: one alone is off by",
    "of_all_features": "does not compute each feature by itself (by_feature): some of them alone, it is off by",
    "fails": "raised RuntimeError: not today (test_torch_function.py:",
    "NO_FUNCTION": "is 7, expected a function",
    "nowhere": "cannot be imported: AttributeError",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_function_that_breaks_the_contract_is_named_before_the_engine_computes_with_it(name: str) -> None:
    op = TorchFunction(f"{__name__}:{name}", (8,), 8, by_feature=True)
    with pytest.raises((PluginError, RuntimeError)) as raised:
        tried(op, (), torch.float32, "cpu")
    assert describe_error(raised.value).startswith(f"torch function {__name__}:{name} {BROKEN[name]}")


def test_what_it_returns_has_the_compute_dtype() -> None:
    op = TorchFunction(f"{__name__}:shifted", (8,), 8)
    made = tried(op, (torch.ones(8), torch.ones(())), torch.bfloat16, "cpu")(torch.zeros(3, 8, dtype=torch.bfloat16))
    assert made.dtype == torch.bfloat16 and bool((made == 1).all())
