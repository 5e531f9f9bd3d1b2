"""What cannot be read is refused with the reason: by its configuration, by its headers, or by its values."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.kernels import tiny
from tests.plugins.quantizer.checkpoint.reference import loaded
from tests.plugins.quantizer.checkpoint.writers import CASES, FP8_INPUTS, Case, awq, ct_config, write_case
from tests.selection import few
from torch import Tensor

from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.checkpoint.tensors import CheckpointError
from engine.contracts.model import DeviceFacts
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.methods import unreadable

CPU = DeviceFacts("cpu")
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def reasons(tmp_path: Path, quantization: Any) -> tuple[str, ...]:
    folder = tiny.write(tmp_path, quantization_config=quantization)
    return unreadable(model_config(str(folder)), CPU)


def packed(**weights: Any) -> dict[str, Any]:
    return ct_config(W4 | weights, "pack-quantized")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method=bitsandbytes: .*what can: compressed-tensors, fp8"),
    "no method": ({"bits": 4}, "quant_method=None: .*what can: compressed-tensors"),
    "method type": ({"quant_method": 4}, r"quant_method=4: expected a string"),
    "nvfp4": (ct_config(FP8 | {"num_bits": 4}, "nvfp4-pack-quantized"), r"\(NVFP4\) is not supported"),
    "mxfp4": (ct_config(FP8 | {"num_bits": 4}, "mxfp4-pack-quantized"), r"\(MXFP4\) is not supported"),
    "2:4": (ct_config(W4, "marlin-24"), "2:4 sparse weights are not supported"),
    "sparsity": (packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
    "not compressed": (ct_config(FP8, "dense"), "not stored in quantized form"),
    "unknown format": (ct_config(FP8, "newest"), "format='newest': expected pack-quantized or int-quantized"),
    "mixed without own": (ct_config(W4, "mixed-precision"), "each group must name its own"),
    "3 bits": (packed(num_bits=3), "weights.num_bits=3: expected 4 or 8 bits"),
    "group size": (packed(group_size=-8), "weights.group_size=-8: expected a positive number, or -1"),
    "group size type": (packed(group_size="32"), "weights.group_size='32': expected an integer"),
    "group without size": (packed(group_size=None), "weights.group_size=None: expected a positive number"),
    "symmetric type": (packed(symmetric="yes"), "weights.symmetric='yes': expected true or false"),
    "strategy": (packed(strategy="row"), "weights.strategy='row': expected tensor or channel or group or block"),
    "dynamic weights": (packed(dynamic=True), "weights have fixed scales"),
    "actorder": (packed(actorder="random"), "weights.actorder='random': expected group, weight or null"),
    "block": (ct_config(FP8 | {"strategy": "block", "block_structure": [128]}, "float-quantized"), "two positive"),
    "embedding": (
        packed() | {"config_groups": {"g": {"targets": ["Embedding"], "weights": W4}}},
        "quantized embeddings are not supported",
    ),
    "groups type": (packed() | {"config_groups": ["Linear"]}, r"config_groups=\['Linear'\]: expected an object"),
    "targets type": (
        packed() | {"config_groups": {"g": {"targets": "Linear", "weights": W4}}}, "targets='Linear': expected a list",
    ),
    "pattern": (packed() | {"ignore": ["re:("]}, r"ignore has '\(', which is no regular expression"),
    "rotated": (packed() | {"transform_config": {"a": 1}}, "rotated"),
    "fp8 e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2': expected e4m3"),
    "fp8 block": ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size=.*two positive integers"),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4': expected FP8"),
    "modelopt awq": ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ"}}, "W4A16_AWQ"),
    "awq gemv": (AWQ | {"version": "gemv"}, "version=gemv: only the gemm layout can be read"),
    "awq symmetric": (AWQ | {"zero_point": False}, "zero_point=False: expected true"),
    "awq bits": (AWQ | {"bits": 3}, "bits=3: expected 4 bits"),
    "gptq bits": (GPTQ | {"bits": 2}, "bits=2: expected 4 or 8 bits"),
    "gptq group": (GPTQ | {"group_size": 0}, "group_size=0: expected a positive number, or -1"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, "only gptq and gptq_v2 can be read"),
    "gptq contradiction": (
        GPTQ | {"checkpoint_format": "gptq_v2", "format": "gptq"},
        "checkpoint_format='gptq_v2' and format='gptq' contradict each other",
    ),
    "awq contradiction": (AWQ | {"w_bit": 3}, "bits=4 and w_bit=3 contradict each other"),
    "gptq converted": (GPTQ | {"modules_in_block_to_quantize": 1}, "modules_in_block_to_quantize=1: expected lists"),
    "gptq converted pattern": (GPTQ | {"modules_in_block_to_quantize": [["re:("]]}, "which is no regular expression"),
    "gptq dynamic": (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, r"dynamic\.\+:\.\*\.bits=2"),
    "gptq dynamic pattern": (GPTQ | {"dynamic": {"-:(": {}}}, "which is no regular expression"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_configuration_alone_shows_it(name: str, tmp_path: Path) -> None:
    quantization, expected = REFUSED[name]
    found = reasons(tmp_path, quantization)
    assert any(re.search(expected, reason) for reason in found), found


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    found = reasons(tmp_path, AWQ | {"bits": 3, "version": "gemv", "zero_point": "yes", "group_size": 1.5})
    assert len(found) == 4


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_read_is_not_refused(name: str, tmp_path: Path) -> None:
    assert reasons(tmp_path, CASES[name].quantization) == ()


def test_quantization_that_is_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssemblyError, match=r"quantization_config 'int4': expected an object"):
        reasons(tmp_path, "int4")


def test_judging_a_checkpoint_does_not_import_torch() -> None:
    code = (
        "import sys; from engine_plugins.quantizer import engine_quantizer; from engine.assembly.model_config import "
        "model_config; from engine.contracts.model import DeviceFacts; m = model_config('bundled'); "
        "[p.unsupported(m, DeviceFacts('cpu')) for p in engine_quantizer()]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("quantization", "activations", "expected"),
    [
        (None, "fp8", "expected one of bf16, auto: the checkpoint is not quantized"),
        (GPTQ, "fp8", "expected one of auto, bf16, int8"),
        (CASES["fp8 block"].quantization, "int8", "expected one of auto, bf16, fp8"),
        (GPTQ, "int8", None),
        (CASES["ct fp8 channel"].quantization, "fp8", None),
    ],
)
def test_rounded_activations_need_weights_of_their_kind(
    quantization: Any, activations: str, expected: str | None, tmp_path: Path
) -> None:
    options = {} if quantization is None else {"quantization_config": quantization}
    facts = model_config(str(tiny.write(tmp_path, **options)))
    found = CheckpointConfig(activations=activations).unsupported(facts, CPU)
    assert [expected in reason for reason in found] == [True] if expected else found == ()


# -- headers


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def error_of(tmp_path: Path, case: Case, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None) -> str:
    quantized, _ = write_case(tmp_path, case)
    with pytest.raises(CheckpointError) as error:
        loaded(changed(quantized, change))
    return str(error.value)


def test_layers_that_are_multiplied_together_must_be_stored_alike(tmp_path: Path) -> None:
    text = error_of(tmp_path, awq(32, left=("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")))
    assert "model.layers.0.self_attn.q_proj is not quantized, model.layers.0.self_attn.k_proj is awq group 32" in text
    assert "model.layers.1.mlp.gate_proj is awq group 32 with zero points, model.layers.1.mlp.up_proj is not" in text


def test_every_wrong_shape_and_dtype_is_named_before_anything_is_read(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.scales"] = torch.ones(2, 64)
        tensors["model.layers.2.self_attn.q_proj.qweight"] = torch.zeros(64, 8)

    text = error_of(tmp_path, awq(32), change)
    assert "model.layers.0.mlp.down_proj.scales has shape [2, 64], expected [3, 64]" in text
    assert "model.layers.2.self_attn.q_proj.qweight is float32, expected int32" in text


def test_groups_other_than_stated_are_a_wrong_shape(tmp_path: Path) -> None:
    case = awq(32)
    text = error_of(tmp_path, replace(case, quantization=case.quantization | {"group_size": 16}))
    assert "model.layers.0.self_attn.q_proj.scales has shape [2, 64], expected [4, 64]" in text


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.gate_proj.qzeros"]

    assert "missing from the checkpoint: model.layers.1.mlp.gate_proj.qzeros" in error_of(tmp_path, awq(32), change)


def test_an_ordered_layer_without_its_order_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.gate_proj.g_idx"]

    assert "gate_proj.g_idx" in error_of(tmp_path, CASES["gptq w4 g16 sym desc_act"], change)


def test_either_name_of_an_fp8_scale_must_be_there(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.gate_proj.weight_scale"]

    text = error_of(tmp_path, CASES["fp8 tensor"], change)
    assert "gate_proj has no scale: expected model.layers.1.mlp.gate_proj.weight_scale_inv or" in text


def test_a_quantized_layer_that_is_said_not_to_be_is_refused(tmp_path: Path) -> None:
    case = CASES["ct fp8 channel, head"]
    quantization = ct_config(FP8, "float-quantized", FP8_INPUTS)
    text = error_of(tmp_path, replace(case, quantization=quantization))
    assert "lm_head.weight is float8_e4m3fn, but the configuration says that this layer is not quantized" in text


def test_8_bit_weights_without_any_configuration_are_refused(tmp_path: Path) -> None:
    weights = tiny.weights()
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is float8_e4m3fn, but the configuration says"):
        loaded(tiny.write(tmp_path, weights))


# -- values

LAYER = "model.layers.1.self_attn.q_proj"


def fill(suffix: str, value: float, index: Any = (0, 0)) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{suffix}"][index] = value

    return change


def nan_code(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight"].view(torch.uint8)[3, 3] = 0x7F


def out_of_4_bits(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight"][0, 0] = 8


W4_PLAIN = ct_config(W4 | {"strategy": "channel", "group_size": None}, "int-quantized")
PLAIN_4_BITS = Case(
    W4_PLAIN, lambda w: ({"weight": torch.zeros(w.shape).to(torch.int8), "weight_scale": torch.ones(w.shape[0], 1)}, w)
)


def _with_float_zeros(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, dense = CASES["ct int8 channel asym"].write(weight)
    return tensors | {"weight_zero_point": tensors["weight_zero_point"].float()}, dense


ZEROS = replace(CASES["ct int8 channel asym"], write=_with_float_zeros)
"""Zero points in a dtype that holds more than int8 does."""
BROKEN: dict[str, tuple[Case, Callable[[dict[str, Tensor]], None], str]] = {
    "nan scale": (CASES["ct fp8 channel"], fill("weight_scale", torch.nan), "weight_scale holds nan: a scale"),
    "negative scale": (CASES["ct fp8 channel"], fill("weight_scale", -1.0), "weight_scale holds -1.0: a scale"),
    "zero scale": (CASES["ct int8 channel"], fill("weight_scale", 0.0), "weight_scale holds 0.0: a scale"),
    "infinite scale": (CASES["fp8 block"], fill("weight_scale_inv", torch.inf), "weight_scale_inv holds inf"),
    "nan of awq": (CASES["awq g32"], fill("scales", torch.nan), "scales holds nan: expected numbers"),
    "nan of gptq": (CASES["gptq w4 g32 sym"], fill("scales", torch.nan), "scales holds nan: expected numbers"),
    "nan weight": (CASES["ct fp8 channel"], nan_code, "weight holds NaN"),
    "codes": (PLAIN_4_BITS, out_of_4_bits, "weight has codes 0 to 8, 4 bits hold -8 to 7"),
    "g_idx range": (CASES["gptq w4 g16 sym desc_act"], fill("g_idx", 9, 0), "g_idx has groups 0 to 9, the layer"),
    "g_idx negative": (CASES["gptq w4 g16 sym desc_act"], fill("g_idx", -1, 0), "g_idx has groups -1 to 3"),
    "g_idx counts": (CASES["gptq w4 g16 sym desc_act"], fill("g_idx", 0, slice(None)), "does not put 16 input"),
    "ct g_idx": (CASES["ct w4 g16 actorder"], fill("weight_g_idx", 0, slice(None)), "does not put 16 input"),
    "zero point too large": (ZEROS, fill("weight_zero_point", 200), "holds 200: a zero point is a whole"),
    "zero point between": (ZEROS, fill("weight_zero_point", 0.5), "holds 0.5: a zero point is a whole number from"),
    "zero point nan": (ZEROS, fill("weight_zero_point", torch.nan), "weight_zero_point holds nan: a zero point"),
    "ct rows": (CASES["ct w4 g32 sym"], fill("weight_shape", 63, 0), r"weight_shape is \[63, 64\], the layer has"),
    "ct shape": (CASES["ct w4 g32 sym"], fill("weight_shape", 63, 1), r"weight_shape is \[64, 63\], the layer has 64"),
    "zeros": (CASES["gptq w4 g32 sym"], fill("qzeros", 0), "not the middle, but sym=true"),
}  # fmt: skip


@few(8)
@pytest.mark.parametrize("name", BROKEN)
def test_values_that_cannot_be_are_named(name: str, tmp_path: Path) -> None:
    case, change, expected = BROKEN[name]
    text = error_of(tmp_path, case, change)
    assert text.startswith(LAYER) and re.search(expected, text), text


def test_the_wrong_version_of_gptq_is_noticed(tmp_path: Path) -> None:
    case = CASES["gptq w4 g32 sym"]
    text = error_of(tmp_path, replace(case, quantization=case.quantization | {"checkpoint_format": "gptq_v2"}))
    assert "sym=true: is checkpoint_format gptq, or sym false?" in text


def test_parts_in_different_orders_are_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        index = tensors["model.layers.0.self_attn.k_proj.g_idx"]
        tensors["model.layers.0.self_attn.k_proj.g_idx"] = index.flip(0)

    text = error_of(tmp_path, CASES["gptq w4 g16 sym desc_act"], change)
    assert "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj" in text and "different orders" in text


def test_a_bias_that_the_model_lacks_must_be_zero(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.bias"] = torch.ones(64)

    text = error_of(tmp_path, CASES["gptq w4 g32 sym"], change)
    assert text == f"{LAYER}.bias is not zero, but the architecture has no bias there"


def test_an_empty_tensor_that_nothing_needs_is_no_hindrance(tmp_path: Path) -> None:
    quantized, _ = write_case(tmp_path, CASES["ct fp8 tensor"])

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.input_scale"] = torch.zeros(0)

    assert loaded(changed(quantized, change)).weights_bytes > 0


@pytest.mark.parametrize("pattern", ["re:.*", "Linear"])
@pytest.mark.parametrize("name", ["ct fp8 channel", "ct int8 channel", "ct w4 g32 sym"])
def test_ignoring_every_layer_does_not_make_quantized_weights_plain_ones(
    name: str, pattern: str, tmp_path: Path
) -> None:
    case = CASES[name]
    text = error_of(tmp_path, replace(case, quantization=case.quantization | {"ignore": [pattern]}))
    assert f"{LAYER}.weight" in text and "the configuration says that this layer is not quantized" in text


def test_a_pattern_that_ignores_nothing_leaves_the_head_quantized(tmp_path: Path) -> None:
    case = CASES["ct w4 g32 sym"]
    text = error_of(tmp_path, replace(case, quantization=case.quantization | {"ignore": ["re:.*lm_haed"]}))
    assert "missing from the checkpoint: lm_head.weight_packed" in text
