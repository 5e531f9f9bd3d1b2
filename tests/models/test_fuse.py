"""Kernels are matched to sequences of ops: the longest first, and none that would hide a value others read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from engine.contracts.graph import Block, Builder, Graph, Node
from engine.contracts.ops import Activation, Add, LinearPart, LinearSpec, Norm, Op, RopeFacts, Scale, SoftCap
from engine.models.fuse import Fused, Match, Matcher, fused, reads


def sequence(*kinds: type[Op]) -> Matcher:
    """Matches ops of these kinds, one after another."""

    def match(nodes: Sequence[Node]) -> Match | None:
        found = tuple(type(node.op) for node in nodes[: len(kinds)])
        return Match(kinds, len(kinds)) if found == kinds else None

    return match


SINGLE = [(kind.__name__, sequence(kind)) for kind in (Norm, Scale, SoftCap, Activation, Add)]


def chain() -> Graph:
    """``add(x, relu(cap(2 * norm(x))))`` of a value that is handed in."""
    b = Builder()
    x = b.input(8)
    b.add(x, b.activation(b.soft_cap(b.scale(b.rms_norm(x, "n", 1e-5), 2.0), 30.0), "relu"))
    return b.graph()


def titles(graph: Graph, *kernels: tuple[str, Matcher], after: Counter[int] | None = None) -> list[str]:
    return [found.kernel for found in calls(graph, *kernels, after=after)]


def calls(graph: Graph, *kernels: tuple[str, Matcher], after: Counter[int] | None = None) -> tuple[Fused[str], ...]:
    return fused(graph.embed, [*kernels, *SINGLE], Counter() if after is None else after)


def test_every_op_is_computed_once_and_in_order() -> None:
    graph = chain()
    two = ("two", sequence(Scale, SoftCap))
    found = calls(graph, two)
    assert [node for call in found for node in call.nodes] == list(graph.embed.nodes)
    assert [call.kernel for call in found] == ["Norm", "two", "Activation", "Add"]
    assert found[1].what == (Scale, SoftCap)


def test_the_longest_sequence_wins_wherever_it_stands_in_the_list() -> None:
    two, three = ("two", sequence(Norm, Scale)), ("three", sequence(Norm, Scale, SoftCap))
    assert titles(chain(), two, three) == titles(chain(), three, two) == ["three", "Activation", "Add"]


def test_of_sequences_of_one_length_the_first_in_the_list_wins() -> None:
    one, other = ("one", sequence(Norm, Scale)), ("other", sequence(Norm, Scale))
    assert titles(chain(), one, other)[0] == "one"
    assert titles(chain(), other, one)[0] == "other"
    assert titles(chain(), ("mine", sequence(Norm)))[0] == "mine"


def test_a_sequence_that_begins_earlier_comes_before_a_longer_one_that_begins_later() -> None:
    early, late = ("early", sequence(Norm, Scale)), ("late", sequence(Scale, SoftCap, Activation))
    assert titles(chain(), early, late) == ["early", "SoftCap", "Activation", "Add"]


def test_an_op_without_a_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="no kernel computes Scale"):
        fused(chain().embed, SINGLE[:1], Counter())


# Values that others read ---------------------------------------------------------------------------------------------


def test_a_value_that_is_read_after_the_sequence_forbids_it() -> None:
    b = Builder()
    normed = b.rms_norm(b.input(8), "n", 1e-5)
    b.add(b.scale(normed, 2.0), normed)
    graph = b.graph()
    assert titles(graph, ("two", sequence(Norm, Scale))) == ["Norm", "Scale", "Add"]
    assert titles(graph, ("all", sequence(Norm, Scale, Add))) == ["all"], "all who read it are in the sequence"


def test_a_value_that_another_block_reads_forbids_the_sequence() -> None:
    graph = chain()
    (normed,) = graph.embed.nodes[0].outputs
    two = ("two", sequence(Norm, Scale))
    assert titles(graph, two)[0] == "two"
    assert titles(graph, two, after=Counter({normed: 1}))[:2] == ["Norm", "Scale"]


def test_a_shorter_sequence_takes_the_place_of_one_that_is_forbidden() -> None:
    graph = chain()
    (capped,) = graph.embed.nodes[2].outputs
    four, three = ("four", sequence(Norm, Scale, SoftCap, Activation)), ("three", sequence(Norm, Scale, SoftCap))
    assert titles(graph, four, three)[0] == "four"
    assert titles(graph, four, three, after=Counter({capped: 1}))[0] == "three", "its last value may be read by anyone"


def test_a_value_made_on_the_way_that_only_others_read_is_an_output() -> None:
    """As queries are, which come before the write of keys and values."""
    b = Builder()
    x = b.input(16)
    with b.layer(x):
        q, k, v = b.linear(x, *(LinearPart(name, 16) for name in "qkv"))
        b.add(x, b.attention(*b.rope(q, k, RopeFacts(), 8), v, 8))
    (layer,) = b.graph().layers

    def write(nodes: Sequence[Node]) -> Match | None:
        return Match("write", 3) if len(nodes) == 5 else None

    def rest(nodes: Sequence[Node]) -> Match | None:
        return Match("rest", 2) if len(nodes) == 2 else None

    first, second = fused(layer, [("write", write), ("rest", rest)], Counter())
    rotated, _ = layer.nodes[1].outputs
    assert first.outputs == (rotated,) and second.inputs == (rotated, x.number)


# What a call reads and leaves ----------------------------------------------------------------------------------------


def test_inputs_come_in_the_order_in_which_they_are_read_and_once() -> None:
    b = Builder()
    x, y = b.input(8), b.input(8)
    b.add(b.add(b.scale(y, 2.0), x), y)
    (found,) = fused(b.graph().embed, [("all", sequence(Scale, Add, Add))], Counter())
    assert found.inputs == (y.number, x.number)


def test_the_last_use_of_a_value_is_where_nobody_after_reads_it() -> None:
    b = Builder()
    x = b.input(8)
    normed = b.rms_norm(x, "n", 1e-5)
    b.add(x, b.add(b.scale(normed, 2.0), normed))
    found = {call.kernel: call for call in calls(b.graph(), ("two", sequence(Scale, Add)))}
    assert found["Norm"].last_use == frozenset()
    assert found["two"].inputs == (normed.number,) and found["two"].last_use == {normed.number}
    assert x.number in found["Add"].last_use


def test_what_another_block_reads_is_never_used_last() -> None:
    graph = chain()
    assert calls(graph)[-1].last_use == set(calls(graph)[-1].inputs)
    (x,) = graph.inputs
    after = calls(graph, after=Counter({x: 1}))[-1]
    assert after.inputs[0] == x and x not in after.last_use


def test_all_that_the_last_op_makes_is_an_output_read_or_not() -> None:
    b = Builder()
    b.rope(b.input(8), b.input(8), RopeFacts(), 8)
    (found,) = fused(b.graph().embed, [("rope", lambda nodes: Match(None, 1))], Counter())
    assert len(found.outputs) == 2


def test_a_call_is_called_by_its_ops() -> None:
    b = Builder()
    x = b.input(8)
    with b.layer(x):
        b.soft_cap(b.attention(x, x, x, 8), 30.0)
    (found,) = fused(b.graph().layers[0], [("all", lambda nodes: Match(None, len(nodes)))], Counter())
    assert found.title == "kv_write, attention, soft_cap"


def test_linears_are_as_the_kernel_wants_them_packed() -> None:
    spec = LinearSpec((LinearPart("p", 8),), 8, kind="gate_up")
    (found,) = fused(chain().embed, [("all", lambda nodes: Match(None, len(nodes), (spec,)))], Counter())
    assert found.linears == (spec,)


def test_a_block_of_nothing_is_no_call() -> None:
    assert fused(Block(()), SINGLE, Counter()) == ()


# Over blocks ---------------------------------------------------------------------------------------------------------


def test_reads_counts_how_often_later_blocks_read_a_value() -> None:
    b = Builder()
    e = x = b.embed("e", 64, 8)
    for _ in range(2):
        with b.layer(x):
            x = b.add(b.add(x, e), e)
    b.lm_head(x, "head", 64)
    graph = b.graph()
    embed, first, second, head = reads(graph)
    assert embed[e.number] == 5 and first[e.number] == 2 and second[e.number] == 0
    assert second[x.number] == 1 and head == Counter()
