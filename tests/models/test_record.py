"""What an architecture records is refused, by its name and with the place, where it is no whole model of the facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.border.calls import PluginError
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelFacts, RopeFacts
from engine.contracts.ops import LinearPart
from engine.models.record import recorded
from engine.testing.context import build_context

MODEL = replace(build_context().model, num_layers=2, layer_windows=(None, None))
"""16 features, 2 heads of keys and values of 8, 64 tokens."""
Record = Callable[[Builder], Any]


class Recorded:
    """Describes every model so."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def describe(self, model: ModelFacts, b: Builder) -> None:
        self._record(b)


def refusal(record: Record) -> str:
    with pytest.raises(PluginError, match=r"^Recorded: describe\(\) recorded a graph that does not fit: ") as refused:
        recorded(Recorded(record), MODEL)
    return str(refused.value).partition("fit: ")[2]


def attend(b: Builder, x: Value, dim: int = 8, size: int = 16) -> Value:
    q, k, v = b.linear(x, *(LinearPart(name, size) for name in "qkv"))
    return b.linear(b.attention(q, k, v, dim), LinearPart("o", 16))


def layers(b: Builder, x: Value, count: int = 2) -> Value:
    for _ in range(count):
        with b.layer(x):
            x = b.add(x, attend(b, x))
    return x


def whole(b: Builder) -> None:
    b.lm_head(layers(b, b.embed("e", 64, 16)), "head", 64)


def test_a_whole_model_is_handed_back() -> None:
    graph = recorded(Recorded(whole), MODEL)
    assert (len(graph.layers), len(graph.caches)) == (2, 2)
    assert recorded(Recorded(whole), MODEL) == graph


def test_nothing_is_no_model() -> None:
    assert refusal(lambda b: None) == "it has no embed before the first layer"


def no_embed(b: Builder) -> None:
    b.lm_head(layers(b, b.input(16)), "head", 64)


def late_embed(b: Builder) -> None:
    x = b.input(16)
    with b.layer(x):
        x = b.add(x, b.add(attend(b, x), b.embed("e", 64, 16)))
    b.lm_head(layers(b, x, 1), "head", 64)


@pytest.mark.parametrize("record", [no_embed, late_embed], ids=lambda record: record.__name__)
def test_tokens_are_embedded_before_the_first_layer(record: Record) -> None:
    assert refusal(record) == "it has no embed before the first layer"


def test_nothing_is_handed_in_but_tokens() -> None:
    def record(b: Builder) -> None:
        b.lm_head(layers(b, b.add(b.embed("e", 64, 16), b.input(16))), "head", 64)

    assert refusal(record) == "it has 2 inputs, expected the tokens alone"


def no_head(b: Builder) -> None:
    b.rms_norm(layers(b, b.embed("e", 64, 16)), "n", 1e-5)


def two_heads(b: Builder) -> None:
    x = layers(b, b.embed("e", 64, 16))
    b.lm_head(x, "one", 64)
    b.lm_head(x, "two", 64)


def head_in_a_layer(b: Builder) -> None:
    x = layers(b, b.embed("e", 64, 16), 1)
    with b.layer(x):
        b.lm_head(b.add(x, attend(b, x)), "head", 64)


@pytest.mark.parametrize("record", [no_head, two_heads, head_in_a_layer], ids=lambda record: record.__name__)
def test_there_is_one_head_and_it_is_behind_the_layers(record: Record) -> None:
    assert refusal(record) == "expected one lm_head, behind the last layer"


def test_what_depends_on_positions_is_in_a_layer() -> None:
    def before(b: Builder) -> None:
        x = b.embed("e", 64, 16)
        x, _ = b.rope(x, x, RopeFacts(), 8)
        b.lm_head(layers(b, x), "head", 64)

    def behind(b: Builder) -> None:
        b.lm_head(attend(b, layers(b, b.embed("e", 64, 16))), "head", 64)

    assert refusal(before) == "embed: Rope outside of the layers"
    assert refusal(behind) == "head: KVWrite outside of the layers"


def test_a_layer_reads_the_residual_that_it_names() -> None:
    def record(b: Builder) -> None:
        e = b.embed("e", 64, 16)
        x = layers(b, e, 1)
        with b.layer(e):
            x = b.add(x, attend(b, x))
        b.lm_head(x, "head", 64)

    assert refusal(record) == "layers[1] does not read its residual"


def test_the_head_reads_the_residual_alone() -> None:
    def record(b: Builder) -> None:
        e = b.embed("e", 64, 16)
        b.lm_head(b.add(layers(b, e), e), "head", 64)

    assert refusal(record) == "the head reads 2 values of what is before it, expected one"


def test_every_layer_of_the_model_is_there() -> None:
    assert refusal(lambda b: b.lm_head(layers(b, b.embed("e", 64, 16), 3), "head", 64)) == "3 layers, expected 2"


def test_each_layer_has_one_attention() -> None:
    def record(b: Builder) -> None:
        x = b.embed("e", 64, 16)
        for count in (1, 2):
            with b.layer(x):
                for _ in range(count):
                    x = b.add(x, attend(b, x))
        b.lm_head(x, "head", 64)

    assert refusal(record) == "3 attentions, expected one for each of 2 layers"


def test_the_embedding_has_the_sizes_of_the_model() -> None:
    assert refusal(lambda b: b.lm_head(layers(b, b.embed("e", 96, 16)), "h", 64)) == "embed [96, 16], expected [64, 16]"


def test_keys_and_values_have_the_heads_of_the_model() -> None:
    def record(dim: int, size: int) -> Record:
        def layers_of(b: Builder) -> None:
            x = layers(b, b.embed("e", 64, 16), 1)
            with b.layer(x):
                x = b.add(x, attend(b, x, dim, size))
            b.lm_head(x, "head", 64)

        return layers_of

    said = "layers[1]: KVWrite: KV heads x head_dim {}, expected [2, 8]"
    assert refusal(record(8, 32)) == said.format([4, 8])
    assert refusal(record(4, 8)) == said.format([2, 4])


def test_logits_are_of_every_token() -> None:
    said = "logits of 96 tokens, expected 64"
    assert refusal(lambda b: b.lm_head(layers(b, b.embed("e", 64, 16)), "head", 96)) == said


def test_what_is_no_value_of_an_op_is_named_with_its_place() -> None:
    def record(b: Builder) -> None:
        b.lm_head(layers(b, b.activation(b.embed("e", 64, 16), "tanh")), "head", 64)  # type: ignore[arg-type]

    said = refusal(record)
    assert said.startswith("graph.embed.nodes[1].op.act is 'tanh', expected 'silu' or 'gelu'")


def test_what_an_architecture_raises_is_not_hidden() -> None:
    def record(b: Builder) -> None:
        b.add(b.embed("e", 64, 16), b.embed("f", 64, 8))

    with pytest.raises(ValueError, match="Add of 16 and 8 features"):
        recorded(Recorded(record), MODEL)
