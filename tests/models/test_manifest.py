"""What a model reads is listed once: by the graph, the quantizer and what the checkpoint has."""

from __future__ import annotations

from engine.contracts.graph import Node
from engine.contracts.ops import (
    Cut,
    Embed,
    Experts,
    FusedExperts,
    Gated,
    HeadLinear,
    Linear,
    LinearPart,
    LinearSpec,
    Norm,
    Share,
)
from engine.models.manifest import Manifest, ManifestEntry


def of(op: object, *names: str) -> list[ManifestEntry]:
    return list(Manifest(names=names).of(Node(op, (), ())))  # type: ignore[arg-type]


def listed(weights: list[ManifestEntry]) -> dict[str, tuple[int, ...] | None]:
    return {tensor.name: tensor.shape for weight in weights for tensor in weight.tensors}


QKV = LinearSpec((LinearPart("q", 8, True), LinearPart("k", 4)), 16)


def test_a_linear_layer_has_the_tensors_of_its_parts():
    (weight,) = of(Linear(QKV))
    assert listed([weight]) == {"q.weight": (8, 16), "q.bias": (8,), "k.weight": (4, 16)}
    assert weight.numbers == 12 * 16 and all(tensor.required for tensor in weight.tensors)
    assert [tensor.suffix for tensor in weight.parts[0]] == ["weight", "bias"]


def test_a_tied_head_reads_nothing():
    assert of(Linear(QKV, tied=True)) == []


def test_a_rank_reads_its_share_of_whole_tensors():
    share = Share(QKV, (((4, 8),), ((2, 4),)))
    (weight,) = of(Linear(LinearSpec((LinearPart("q", 4, True), LinearPart("k", 2)), 16, share=share)))
    assert listed([weight]) == {"q.weight": (8, 16), "q.bias": (8,), "k.weight": (4, 16)}
    assert [tensor.cuts for tensor in weight.tensors] == [((0, ((4, 8),)),), ((0, ((4, 8),)),), ((0, ((2, 4),)),)]
    assert weight.numbers == 6 * 16


def test_of_summands_one_rank_reads_the_bias():
    whole = LinearSpec((LinearPart("o", 8, True),), 16)
    for first, reads in ((0, True), (8, False)):
        share = Share(whole, (((0, 8),),), (first, first + 8))
        (weight,) = of(Linear(LinearSpec((LinearPart("o", 8, True),), 8, share=share)))
        assert {tensor.name: tensor.is_read for tensor in weight.tensors} == {"o.weight": True, "o.bias": reads}


def experts(transposed: bool = False) -> Experts:
    up = LinearSpec((LinearPart("{}.gate", 6), LinearPart("{}.up", 6)), 4)
    down = LinearSpec((LinearPart("{}.down", 4),), 6)
    return Experts(2, 1, up, down, Gated("silu"), FusedExperts("all.gate_up", "all.down", transposed))


def test_experts_are_listed_one_by_one_or_together_as_the_checkpoint_has_them():
    single = of(experts())
    assert [weight.together for weight in single] == [0] * 4
    assert listed(single)["1.up.weight"] == (6, 4) and listed(single)["0.down.weight"] == (4, 6)
    together = of(experts(), "all.gate_up", "all.down")
    assert listed(together) == {"all.gate_up": (2, 12, 4), "all.down": (2, 4, 6)}
    assert listed(of(experts(transposed=True), "all.gate_up")) == {"all.gate_up": (2, 4, 12), "all.down": (2, 6, 4)}
    assert sum(weight.numbers for weight in single) == sum(weight.numbers for weight in together)


def test_what_is_no_linear_layer_has_shapes_and_cuts_too():
    (table,) = of(Embed("embed", 32, 4, rows=Cut(8, 16, 32)))
    (tensor,) = table.tensors
    assert (tensor.shape, tensor.cuts, table.numbers) == ((32, 4), ((0, ((8, 16),)),), 32)
    (norm,) = of(Norm("rms", "norm", 4, 1e-6))
    assert norm.kind == "small" and listed([norm]) == {"norm.weight": (4,)}


def test_a_projection_of_heads_counts_once_however_many_ops_read_of_it():
    (weight,) = of(HeadLinear("kv_b", num_heads=2, rows=6, start=0, stop=4, features=8, transposed=True))
    assert weight.kind == "heads" and listed([weight]) == {"kv_b.weight": (12, 8)}
