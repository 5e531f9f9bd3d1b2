"""What load_model accepts, reports and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from engine.checkpoint.tensors import CheckpointError, open_checkpoint
from engine.kernels.loading import load_model
from engine.models.checkpoint_checks import check_names
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
    assert seen[-1] == 1.0 and model.notes == ("1 tensors of the checkpoint (0.0 GB) are not read: visual.*",)


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
    assert torch.allclose(PagedLoop(facts, model).logits(TOKENS), of_transformers(tmp_path), atol=1e-4)
    assert model.weights_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())


def sharded(folder: Path, tensors: dict[str, torch.Tensor], index: dict[str, str], **options: Any) -> Path:
    """Linear layers in one file, all others in another."""
    tiny.write(folder, tensors, **options)
    for number in (0, 1):
        mine = {name: tensor for name, tensor in tensors.items() if (tensor.dim() > 1) == number}
        save_file(mine, folder / f"model-{number}.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def of_transformers(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([TOKENS])).logits[0]
    return logits


def test_a_model_whose_index_is_out_of_date_is_that_of_transformers(tmp_path: Path) -> None:
    """A tensor elsewhere than it says, one that it does not name, and one that is in no file and is not needed."""
    tensors = tiny.weights()
    index = dict.fromkeys(tensors, "model-0.safetensors") | {"model.norm.weight": "model-1.safetensors"}
    del index["model.layers.0.mlp.up_proj.weight"]
    facts, model = load(sharded(tmp_path, tensors, index | {"model.layers.9.gone": "model-0.safetensors"}))
    assert torch.allclose(PagedLoop(facts, model).logits(TOKENS), of_transformers(tmp_path), atol=1e-4)
    assert model.notes[0].startswith("model.safetensors.index.json is out of date: ")


def test_one_file_beside_an_index_is_the_model_as_in_transformers(tmp_path: Path) -> None:
    tensors = tiny.weights(seed=1)
    sharded(tmp_path, tensors, {name: f"model-{int(tensor.dim() > 1)}.safetensors" for name, tensor in tensors.items()})
    sharded_logits = of_transformers(tmp_path)
    save_file(tiny.weights(), tmp_path / "model.safetensors", {"format": "pt"})
    facts, model = load(tmp_path)
    logits = PagedLoop(facts, model).logits(TOKENS)
    assert torch.allclose(logits, of_transformers(tmp_path), atol=1e-4)
    assert not torch.allclose(logits, sharded_logits, atol=1.0)


@pytest.mark.parametrize("lost", ["model.norm.weight", "lm_head.weight"])
def test_a_tensor_that_only_the_index_has_is_missing(lost: str, tmp_path: Path) -> None:
    """A head, too, that the embedding could stand in for."""
    tensors = tiny.weights()
    index = {name: f"model-{int(tensor.dim() > 1)}.safetensors" for name, tensor in tensors.items()}
    del tensors[lost]
    with pytest.raises(CheckpointError, match=f"missing from the checkpoint: {lost}$"):
        load(sharded(tmp_path, tensors, index, tie_word_embeddings=True))


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
