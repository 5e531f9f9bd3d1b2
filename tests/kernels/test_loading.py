"""What load_model accepts, reports and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.checkpoint.tensors import CheckpointError, open_checkpoint
from engine.kernels.loading import load_model
from engine.models.required_tensors import check_names
from engine.testing.attention_cases import PlainFormat
from engine.testing.plain import PlainAttention, PlainQuantizer
from tests.families import model_facts, model_graph
from tests.kernels import tiny
from tests.kernels.paged_loop import PagedLoop, load

TOKENS = list(range(20, 60))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny.weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing.*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(tiny.write(tmp_path, tensors))


def test_a_left_over_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny.weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        load(tiny.write(tmp_path, tensors))


def test_tensors_of_parts_that_the_model_does_not_read_are_none_left_over(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny.write(tmp_path, tiny.weights() | {"visual.proj.weight": torch.zeros(4)})))
    graph = model_graph(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"does not use: visual\.proj\.weight$"):
        check_names(checkpoint, graph, PlainQuantizer(), "here")
    graph, seen = replace(graph, ignored=("visual.",)), [0.0]
    check_names(checkpoint, graph, PlainQuantizer(), "here")
    plugins = PlainQuantizer(), PlainAttention(), PlainFormat()
    model = load_model(
        model_facts(str(tmp_path)), graph, *plugins, "float32", "cpu", lambda fraction, _: seen.append(fraction)
    )
    assert seen[-1] == 1.0 and model.unread == "1 tensors of the checkpoint (0.0 GB) are not read: visual.*"


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = tiny.weights() | {"model.layers.2.self_attn.k_proj.weight": torch.zeros(64, 32)}
    with pytest.raises(CheckpointError, match=r"k_proj\.weight' has shape \[64, 32\], the model expects \[32, 64\]"):
        load(tiny.write(tmp_path, tensors))


def test_a_wrong_embedding_shape_is_named(tmp_path: Path) -> None:
    tensors = tiny.weights() | {"model.embed_tokens.weight": torch.zeros(119, 64)}
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load(tiny.write(tmp_path, tensors))


def test_a_wrong_norm_shape_is_named(tmp_path: Path) -> None:
    tensors = tiny.weights() | {"model.layers.0.input_layernorm.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match="input_layernorm"):
        load(tiny.write(tmp_path, tensors))


def test_derived_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = tiny.weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load(tiny.write(tmp_path, tensors))


def test_a_head_that_is_stored_is_not_the_embedding_whatever_the_configuration_says(tmp_path: Path) -> None:
    """As in transformers, which ties no weights that differ."""
    tensors = tiny.weights()
    facts, model = load(tiny.write(tmp_path, tensors, tie_word_embeddings=True))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, tensors["lm_head.weight"]) and not facts.tie_embeddings
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    assert torch.allclose(PagedLoop(facts, model).logits(TOKENS), want, atol=1e-4)
    assert model.weights_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())


def test_progress_rises_to_one_and_names_what_was_read(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    load(tiny.write(tmp_path), on_progress=lambda fraction, what: seen.append((fraction, what)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert [what for _, what in seen] == ["layer 1/3", "layer 2/3", "layer 3/3", "head"]


def test_the_plan_hears_what_every_sequence_of_ops_runs_on(tmp_path: Path) -> None:
    _, model = load(tiny.write(tmp_path))
    names = [line.split(":")[0] for line in model.lowering]
    layer = ["norm, linear, rope, kv_write", "attention", "linear, add", "norm, linear, gated"]
    assert names == ["embed", *layer, "norm", "linear"]
    assert "TorchAttention" in model.lowering[2]


def test_weights_bytes_counts_what_is_held(tmp_path: Path) -> None:
    tensors = tiny.weights()
    _, model = load(tiny.write(tmp_path, tensors))
    assert model.weights_bytes == sum(t.numel() * 4 for t in tensors.values())
