"""What an architecture records is refused, by its name and with the place, where it is no whole model; facts follow
from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.tensors import CheckpointError, open_checkpoint
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Attention, LinearPart, RopeFacts
from engine.models.checkpoint_checks import checkpoint_notes
from engine.models.manifest import unread_names
from engine.models.record import facts, recorded
from engine.plugin_guard.calls import PluginError
from engine.testing.context import build_context

MODEL = build_context().model
Record = Callable[[Builder], Any]


class Recorded:
    """Describes every model so."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def describe(self, model: ModelConfig, b: Builder) -> None:
        b.positions(64)
        self._record(b)


def refusal(record: Record) -> str:
    with pytest.raises(
        PluginError, match=r"^Recorded: describe\(\) recorded a graph that is no whole model: "
    ) as refused:
        recorded(Recorded(record), MODEL)
    return str(refused.value).partition("whole model: ")[2]


def attend(b: Builder, x: Value, dim: int = 8, size: int = 16) -> Value:
    q, k, v = b.linear(x, *(LinearPart(name, size) for name in "qkv"))
    return b.linear(b.attention(q, k, v, dim), LinearPart("o", 16))


def layers(b: Builder, x: Value, count: int = 2) -> Value:
    for _ in range(count):
        with b.layer(x):
            x = b.add(x, attend(b, x))
    return x


def whole(b: Builder) -> None:
    b.lm_head(layers(b, b.embed("e", 64, 16)), "head", 60)


def test_a_whole_model_is_handed_back() -> None:
    graph = recorded(Recorded(whole), MODEL)
    assert (len(graph.layers), len(graph.caches)) == (2, 2)
    assert recorded(Recorded(whole), MODEL) == graph


def test_an_architecture_may_ask_how_names_of_stored_tensors_begin(tmp_path: Path) -> None:
    """One configuration may go with several ways to store a model."""
    answers = []

    def record(b: Builder) -> None:
        answers.append([b.has(prefix) for prefix in ("text.", "text.e", "e")])
        whole(b)

    for folder in (MODEL.path, str(tmp_path)):
        recorded(Recorded(record), replace(MODEL, path=folder))
    save_file({"text.e.weight": torch.zeros(64, 16)}, tmp_path / "model.safetensors")
    recorded(Recorded(record), replace(MODEL, path=str(tmp_path)))
    assert answers == [[False] * 3, [False] * 3, [True, True, False]]


def test_files_are_read_only_where_an_architecture_asks(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    model = replace(MODEL, path=str(tmp_path))
    recorded(Recorded(whole), model)
    with pytest.raises(CheckpointError, match="too short for a safetensors file"):
        recorded(Recorded(lambda b: b.has("e")), model)


def test_what_is_not_read_of_a_checkpoint_is_no_left_over(tmp_path: Path) -> None:
    save_file({f"seen.{i}": torch.zeros(4) for i in range(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))

    def record(b: Builder) -> None:
        b.ignore("seen.", "heard.")
        whole(b)

    graph = recorded(Recorded(record), MODEL)
    assert unread_names(graph, checkpoint.names) == {"seen.0", "seen.1"}
    assert checkpoint_notes(graph, checkpoint) == ("2 tensors of the checkpoint (0.0 GB) are not read: seen.*",)
    assert checkpoint_notes(recorded(Recorded(whole), MODEL), checkpoint) == ()


def test_facts_follow_from_the_graph() -> None:
    found = facts(Recorded(whole), MODEL)
    assert (found.num_layers, found.hidden_size, found.vocab_size, found.max_position) == (2, 16, 60, 64)
    assert found.attentions == (Attention(2, 2, 8, 8**-0.5),) and not found.tie_embeddings
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (2, 2, 8)
    assert (found.path, found.name, found.raw) == (MODEL.path, MODEL.name, MODEL.raw)


def test_attentions_that_differ_are_facts_of_their_own() -> None:
    def record(b: Builder) -> None:
        x = b.embed("e", 64, 16)
        for window in (8, None, 8, 64):
            with b.layer(x):
                q, k, v = b.linear(x, *(LinearPart(name, 16) for name in "qkv"))
                x = b.add(x, b.attention(q, k, v, 8, window=window))
        b.lm_head(x, "head", 64)

    found = [op.window for op in facts(Recorded(record), MODEL).attentions]
    assert found == [8, None], "a window of all 64 positions is none"


def test_a_model_says_how_long_a_sequence_may_be() -> None:
    assert refusal(lambda b: b.positions(0)) == "expected positions() of at least 1"


def test_nothing_is_no_model() -> None:
    assert refusal(lambda b: b.embed("e", 64, 16)) == "it has no layer()"


def test_a_model_attends() -> None:
    def record(b: Builder) -> None:
        x = b.embed("e", 64, 16)
        with b.layer(x):
            x = b.rms_norm(x, "n", 1e-5)
        b.lm_head(x, "head", 64)

    assert refusal(record) == "it has no attention()"


def no_embed(b: Builder) -> None:
    b.lm_head(layers(b, b.input(16)), "head", 64)


def late_embed(b: Builder) -> None:
    x = b.input(16)
    with b.layer(x):
        x = b.add(x, b.add(attend(b, x), b.embed("e", 64, 16)))
    b.lm_head(layers(b, x, 1), "head", 64)


@pytest.mark.parametrize("record", [no_embed, late_embed], ids=lambda record: record.__name__)
def test_tokens_are_embedded_before_the_first_layer(record: Record) -> None:
    assert refusal(record) == "it has no embed()"


def test_nothing_is_handed_in_but_tokens() -> None:
    def record(b: Builder) -> None:
        b.lm_head(layers(b, b.add(b.embed("e", 64, 16), b.input(16))), "head", 64)

    assert refusal(record) == "2 values are handed in, expected the tokens alone"


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
def test_there_is_one_head_and_it_is_after_the_layers(record: Record) -> None:
    assert refusal(record) == "expected one lm_head(), after the last layer"


def test_what_depends_on_positions_is_in_a_layer() -> None:
    def before(b: Builder) -> None:
        x = b.embed("e", 64, 16)
        x, _ = b.rope(x, x, RopeFacts(), 8)
        b.lm_head(layers(b, x), "head", 64)

    def after(b: Builder) -> None:
        b.lm_head(attend(b, layers(b, b.embed("e", 64, 16))), "head", 64)

    assert refusal(before) == "embed: Rope outside of a layer"
    assert refusal(after) == "head: KVWrite outside of a layer"


def test_a_layer_reads_the_residual_that_it_names() -> None:
    def record(b: Builder) -> None:
        e = b.embed("e", 64, 16)
        x = layers(b, e, 1)
        with b.layer(e):
            x = b.add(x, attend(b, x))
        b.lm_head(x, "head", 64)

    assert refusal(record) == "layers[1]: expected layer(x) with the value x that it begins with"


def test_the_head_reads_the_residual_alone() -> None:
    def record(b: Builder) -> None:
        e = b.embed("e", 64, 16)
        b.lm_head(b.add(layers(b, e), e), "head", 64)

    assert refusal(record) == "head: it reads 2 values of what is before it, expected one"


def test_every_token_that_is_chosen_can_be_embedded() -> None:
    said = "logits of 96 tokens, embeddings of 64"
    assert refusal(lambda b: b.lm_head(layers(b, b.embed("e", 64, 16)), "head", 96)) == said


def test_the_head_is_found_after_other_projections() -> None:
    def record(b: Builder) -> None:
        x = b.linear(layers(b, b.embed("e", 64, 16)), LinearPart("narrow", 8))
        b.lm_head(x, "head", 48, tied=False)

    graph = recorded(Recorded(record), MODEL)
    assert (graph.lm_head.spec.out_features, graph.hidden_size) == (48, 16)


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
