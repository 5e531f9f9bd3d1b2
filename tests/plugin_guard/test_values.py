"""Plain data is what its annotation says, or the place where it is not is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from engine.contracts.attention_kernel import AttentionCapabilities, AttentionKernel
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.router import Reject, Route, ToEngine
from engine.plugin_guard.values import attribute_problems, problems


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int = 1


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str] = (1, "a")
    kind: Literal["a", "b"] = "a"
    share: float = 0.5
    free: Any = None
    by_name: Mapping[str, int] = field(default_factory=dict)
    names: Sequence[str] = ()
    maybe: Leaf | None = None


@pytest.mark.parametrize(
    "value, said",
    [
        (Tree((Leaf("x"),)), []),
        (Tree((Leaf("x"),), share=1), []),
        (Tree((), free=object(), names=["a"], by_name={"a": 1}, maybe=Leaf("y")), []),
        (Tree([Leaf("x")]), []),  # type: ignore[arg-type]
        (Tree({}), ["t.leaves is {}, expected tuple[test_values.Leaf, ...]"]),  # type: ignore[arg-type]
        (Tree((Leaf("x"), Leaf(3))), ["t.leaves[1].name is 3, expected str"]),  # type: ignore[arg-type]
        (Tree((Leaf("x", True),)), ["t.leaves[0].size is True, expected int"]),
        (Tree((), pair=(1, 2)), ["t.pair[1] is 2, expected str"]),  # type: ignore[arg-type]
        (Tree((), pair=(1,)), ["t.pair is (1,), expected tuple[int, str]"]),  # type: ignore[arg-type]
        (Tree((), kind="c"), ["t.kind is 'c', expected 'a' or 'b'"]),  # type: ignore[arg-type]
        (Tree((), share="half"), ["t.share is 'half', expected float"]),  # type: ignore[arg-type]
        (Tree((), names="abc"), ["t.names is 'abc', expected Sequence[str]"]),
        (Tree((), by_name=[]), ["t.by_name is [], expected Mapping[str, int]"]),  # type: ignore[arg-type]
        (Tree((), maybe=Leaf(5)), ["t.maybe.name is 5, expected str"]),  # type: ignore[arg-type]
        (Tree((), maybe=5), ["t.maybe is 5, expected Leaf or None"]),  # type: ignore[arg-type]
        (None, ["t is None, expected Tree"]),
    ],
)
def test_the_first_place_that_differs_is_named(value: Any, said: list[str]) -> None:
    found = [text.replace("tests.plugin_guard.", "") for text in problems(value, Tree, "t")]
    assert found == said


def test_a_choice_of_records_is_told_by_the_one_that_was_meant() -> None:
    assert list(problems(Reject(404, "no"), Route, "route")) == []
    assert list(problems(ToEngine(5), Route, "route")) == ["route.engine_id is 5, expected str"]  # type: ignore[arg-type]


def test_contracts_are_understood() -> None:
    class Kernel:
        capabilities = AttentionCapabilities(None, ("float32",), True, True, 8, capturable=1)  # type: ignore[arg-type]

    assert list(attribute_problems(Kernel(), AttentionKernel)) == ["capabilities.capturable is 1, expected bool"]
    spec = LinearSpec((LinearPart("q", 8), LinearPart("k", "8")), 4)  # type: ignore[arg-type]
    assert list(problems(spec, LinearSpec, "qkv")) == ["qkv.parts[1].out_features is '8', expected int"]
