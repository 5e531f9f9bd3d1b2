"""Every format: a whole model's logits are those of the dense weights that the checkpoint stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import model_facts, model_graph
from tests.kernels import tiny
from tests.kernels.paged_loop import PagedLoop, load
from tests.plugins.quantizer.checkpoint.reference import LARGEST, TOKENS, difference, loaded, logits, reader
from tests.plugins.quantizer.checkpoint.writers import (
    CASES,
    block_fp8,
    ct_fp8,
    ct_int8,
    ct_packed,
    fp8,
    gptq,
    write_case,
)
from tests.selection import few

from engine.assembly.device_facts import device_facts
from engine.checkpoint.tensors import open_checkpoint
from engine.contracts.model import DeviceFacts
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import UNQUANTIZED
from engine.kernels.packing import Target, packed_bytes
from engine.models.manifest import Manifest
from engine.testing.context import build_context
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.methods import recipe_of
from engine_plugins.quantizer.checkpoint.quantizer import FromCheckpoint
from engine_plugins.quantizer.config import UnquantizedConfig
from engine_plugins.quantizer.unquantized import Unquantized


@few(12)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dense_weights(
    name: str, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = difference(*write_case(tmp_path, CASES[name]))
    record_property("largest_relative_error", found)
    with capsys.disabled():
        print(f"\n{name:28s} largest relative error of logits {found:.1e}", end="")
    assert found <= LARGEST


@pytest.mark.parametrize("name", ["ct fp8 channel", "awq g32", "gptq w4 g16 asym desc_act", "ct int8 channel"])
def test_rounding_changes_the_model_so_that_agreement_means_something(name: str, tmp_path: Path) -> None:
    """The unquantized weights are much further away than the dense copy."""
    quantized, dense = write_case(tmp_path, CASES[name])

    (tmp_path / "original").mkdir()
    original = tiny.write(tmp_path / "original")
    assert difference(quantized, original) > 100 * LARGEST
    assert difference(quantized, dense) <= LARGEST


@few(12)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_known_before_a_tensor_is_read(name: str, tmp_path: Path) -> None:
    quantized, _ = write_case(tmp_path, CASES[name])
    _, model = load(quantized, quantizer=reader(quantized))
    kept = 120 * 64 * 4 + 4 * 64 * (2 * 3 + 1)  # embedding and norms, float32
    kept += sum(scale.nbytes for scales in model.kv_scales if scales is not None for scale in scales)
    held, estimated = model.weights_bytes - kept, _estimated(quantized)
    assert 0.99 * held <= estimated <= 1.1 * held


def _estimated(folder: Path) -> int:
    graph = model_graph(str(folder))
    quantizer: Any = reader(folder)
    target = Target("cpu", torch.float32)
    return sum(packed_bytes(spec, quantizer.format(spec), target) for spec in Manifest().layers(graph))


@pytest.mark.parametrize(
    ("case", "activations", "kind"),
    [(ct_int8(), "auto", "int8"), (ct_fp8("channel"), "auto", "bf16"), (ct_fp8("channel"), "fp8", "fp8"),
     (ct_packed(4, 32, True), "auto", "bf16"), (ct_packed(4, 32, True), "int8", "int8"),
     (ct_int8(), "bf16", "bf16")],
)  # fmt: skip
def test_activations_are_rounded_as_the_checkpoint_or_the_user_says(
    case: Any, activations: str, kind: str, tmp_path: Path
) -> None:
    quantized, dense = write_case(tmp_path, case)
    want = logits(dense)
    error = float((logits(quantized, activations) - want).abs().max() / want.abs().max())
    assert (error <= LARGEST) == (kind == "bf16") and error < 0.2
    (line,) = [line for line in loaded(quantized, activations).lowering if line.startswith("linear, add:")]
    says = {"int8": "int8 activations", "fp8": "fp8 activations"}.get(kind)
    assert says in line if says else "activations" not in line
    assert ("FP8 is storage only" in line) == ("fp8" in line and kind == "bf16")


def test_fp8_is_multiplied_where_the_device_has_units_for_it(tmp_path: Path) -> None:
    quantized, _ = write_case(tmp_path, ct_fp8("channel"))
    facts = model_facts(str(quantized))

    def lossless(capability: tuple[int, int]) -> bool:
        context = replace(build_context(device=DeviceFacts("cuda", capability=capability)), model=facts)
        return FromCheckpoint(CheckpointConfig(), context).lossless

    assert lossless((8, 0)) and lossless((8, 6)) and not lossless((8, 9)) and not lossless((9, 0))


def test_biases_are_read_in_every_layout(tmp_path: Path) -> None:
    """Qwen2 has biases at q, k and v."""
    for name in ("ct w4 g32 sym", "awq g32", "gptq w4 g16 sym desc_act", "ct fp8 channel"):
        case = CASES[name]
        sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
        generator = torch.Generator().manual_seed(4)
        biases = {
            f"model.layers.{i}.self_attn.{part}.bias": torch.randn(size, generator=generator)
            for i in range(3)
            for part, size in sizes.items()
        }
        folder = tmp_path / name
        folder.mkdir()
        options = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        quantized, dense = write_case(folder, replace(case, extra=biases), **options)
        _add(dense, biases)
        assert difference(quantized, dense) <= LARGEST


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


def test_gptq_may_have_biases_of_zeros_that_the_model_lacks(tmp_path: Path) -> None:
    zeros = {f"model.layers.{i}.self_attn.{part}_proj.bias": torch.zeros(64 if part in "qo" else 32)
             for i in range(3) for part in "qkvo"}  # fmt: skip
    case = gptq(4, 32, True, False, "gptq")
    quantized, dense = write_case(tmp_path, replace(case, extra=zeros))
    assert difference(quantized, dense) <= LARGEST


def test_device_and_checkpoint_facts_are_all_the_reader_needs(tmp_path: Path) -> None:
    """A checkpoint without quantization is read as ``quantizer=none`` reads it."""
    folder = tiny.write(tmp_path)
    context = replace(build_context(device=device_facts("cpu")), model=model_facts(str(folder)))
    facts, model = load(folder, quantizer=Unquantized(UnquantizedConfig(), context))
    assert torch.equal(logits(folder, "auto"), PagedLoop(facts, model).logits(TOKENS))
    quantizer = reader(folder, "auto")
    assert quantizer.lossless and tuple(quantizer.stored(_head())) == UNQUANTIZED
    assert open_checkpoint(str(folder)).names


def _head() -> Any:
    return LinearSpec((LinearPart("lm_head", 120),), 64, kind="head")


def test_scales_of_blocks_may_be_powers_of_two(tmp_path: Path) -> None:
    """As later DeepSeek models store them."""

    def write(weight: torch.Tensor) -> Any:
        tensors, _ = fp8(weight, "block", (32, 32), "weight_scale_inv")
        exponent = tensors["weight_scale_inv"].log2().ceil()
        scale = torch.exp2(exponent).repeat_interleave(32, 0).repeat_interleave(32, 1)[:, : weight.shape[1]]
        codes = (weight / scale[: weight.shape[0]]).to(torch.float8_e4m3fn)
        stored = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        return {"weight": codes, "weight_scale_inv": stored}, codes.float() * scale[: weight.shape[0]]

    assert difference(*write_case(tmp_path, replace(block_fp8(), write=write))) <= LARGEST


def test_what_older_writers_say_is_understood(tmp_path: Path) -> None:
    """``compression_config`` and ``128x128``."""
    case = CASES["ct fp8 block"]
    quantized, dense = write_case(tmp_path, case)
    config = json.loads((quantized / "config.json").read_text())
    old = config.pop("quantization_config")
    old["config_groups"]["group_0"]["weights"]["block_structure"] = "32x16"
    (quantized / "config.json").write_text(json.dumps(config | {"compression_config": old}))
    assert difference(quantized, dense) <= LARGEST


def test_names_count_before_patterns_and_patterns_before_classes(tmp_path: Path) -> None:
    """Three groups of one checkpoint, each with a format of its own."""
    w4, w8, fp8_group = (
        CASES[name].quantization["config_groups"]["group_0"] | {"format": form}
        for name, form in (
            ("ct w4 g32 asym", "pack-quantized"), ("ct int8 channel", "int-quantized"),
            ("ct fp8 channel", "float-quantized"),
        )
    )  # fmt: skip
    exact = ["model.layers.0.mlp.down_proj"]
    groups = {
        "a": w8 | {"targets": ["Linear"]}, "b": w4 | {"targets": ["re:.*mlp.*"]}, "c": fp8_group | {"targets": exact},
    }  # fmt: skip
    config = ct_fp8("channel").quantization | {"format": "mixed-precision", "config_groups": groups}

    def scheme(name: str) -> str:
        found = recipe_of(config).scheme_of(name, False)
        assert found is not None
        return f"{'fp' if found.floating else 'int'}{found.bits}"

    assert scheme("model.layers.0.self_attn.q_proj") == "int8"
    assert scheme("model.layers.1.mlp.down_proj") == scheme("model.layers.0.mlp.up_proj") == "int4"
    assert scheme("model.layers.0.mlp.down_proj") == "fp8"
    assert recipe_of(config).scheme_of("lm_head", True) is None


def test_gptq_patterns_leave_layers_or_give_them_bits_of_their_own() -> None:
    dynamic = {r"-:.*\.0\..*": {}, r"+:.*down_proj": {"bits": 8, "group_size": 64}, r".*up_proj": {"sym": False}}
    recipe = recipe_of(gptq(4, 32, True, True, "gptq").quantization | {"dynamic": dynamic})
    assert recipe.scheme_of("model.layers.0.mlp.down_proj", False) is None
    down, up = (recipe.scheme_of(f"model.layers.1.mlp.{name}_proj", False) for name in ("down", "up"))
    assert down is not None and (down.bits, down.block, down.symmetric, down.ordered) == (8, (1, 64), True, True)
    assert up is not None and (up.bits, up.block, up.symmetric) == (4, (1, 32), False)


@pytest.mark.parametrize("name", ["ct fp8 channel, head", "gptq w4 one group, head"])
def test_a_quantized_head_that_is_stored_is_the_head_of_a_tied_model_too(name: str, tmp_path: Path) -> None:
    assert difference(*write_case(tmp_path, CASES[name], tie_word_embeddings=True)) <= LARGEST
