"""Quantized checkpoints written from the descriptions of their formats, beside the dense weights they stand for.

Nothing here shares code with what reads them: packing is arithmetic on whole numbers, dequantization is written out
weight by weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.kernels import tiny
from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3",
               "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # fmt: skip
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by suffix, and its dense weight ``[out, in]`` in float32."""
Writer = Callable[[Tensor], Stored]


@dataclass(frozen=True)
class Case:
    """A way to write every linear layer, and what ``config.json`` says of it."""

    quantization: dict[str, Any]
    write: Writer
    head: bool = False
    left: tuple[str, ...] = ()
    """Parts of names of layers that stay as they are."""
    extra: dict[str, Tensor] = field(default_factory=dict)


def write_case(
    folder: Path, case: Case, weights: dict[str, Tensor] | None = None, config: dict[str, Any] = tiny.CONFIG,
    **options: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """The checkpoint and its dense copy, both in ``folder``. ``weights``: of the unquantized model, by default
    :func:`tests.kernels.tiny.weights`; ``options``: more of ``config``."""
    quantized, dense = folder / "quantized", folder / "dense"
    stored, plain = (dict(tiny.weights() if weights is None else weights) for _ in range(2))
    for name in [name for name in stored if is_converted(name, case)]:
        layer = name.removesuffix(".weight")
        tensors, plain[name] = case.write(stored.pop(name))
        stored |= {f"{layer}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    for path, tensors, more in (
        (quantized, stored | case.extra, {"quantization_config": case.quantization}),
        (dense, plain, {}),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | more | options))
        save_file(tensors, path / "model.safetensors")
    return quantized, dense


def is_converted(name: str, case: Case) -> bool:
    is_linear = any(name.endswith(f".{projection}.weight") for projection in PROJECTIONS)
    is_left = any(part in name for part in case.left)
    return (is_linear or (case.head and name == "lm_head.weight")) and not is_left


def to_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """``[rows, n]`` of ``0 .. 2**bits - 1`` -> int32 ``[rows, n * bits / 32]``. ``order[i]``: the code, of those that
    share a word, that is the ``i``-th from the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    word = torch.zeros(padded.shape[0], padded.shape[1] // per_word, dtype=torch.int64)
    for place, source in enumerate(order or range(per_word)):
        word += padded[:, source::per_word] * 2 ** (bits * place)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def grouped_codes(weight: Tensor, group: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, in]`` from 0, zero points and float16 scales ``[out, groups]``. ``group [in]``: of each input."""
    groups, top = int(group.max()) + 1, 2**bits - 1
    scale, zero = torch.zeros(weight.shape[0], groups), torch.zeros(weight.shape[0], groups)
    for g in range(groups):
        mine = weight[:, group == g]
        low, high = mine.amin(1).clamp(max=0), mine.amax(1).clamp(min=0)
        if symmetric:
            scale[:, g], zero[:, g] = mine.abs().amax(1) / (top // 2), top // 2 + 1
        else:
            scale[:, g] = (high - low) / top
            zero[:, g] = (-low / scale[:, g]).round()
    scale = scale.half().float()
    codes = (weight / scale[:, group] + zero[:, group]).round().clamp(0, top)
    return codes, zero.clamp(0, top), scale


def dense_of(codes: Tensor, zero: Tensor, scale: Tensor, group: Tensor) -> Tensor:
    return (codes - zero[:, group]) * scale[:, group]


def shuffled_groups(inputs: int, size: int, seed: int) -> Tensor:
    """The group of each input feature when the features were taken in another order."""
    rank = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
    return rank // size


def in_groups(inputs: int, size: int) -> Tensor:
    return torch.arange(inputs) // (size if size > 0 else inputs)


# -- compressed-tensors


def ct_config(weights: dict[str, Any], form: str, inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None} | more


def ct_packed(bits: int, size: int, symmetric: bool, ordered: bool = False) -> Case:
    def write(weight: Tensor) -> Stored:
        inputs = weight.shape[1]
        group = shuffled_groups(inputs, size, inputs) if ordered else in_groups(inputs, size)
        codes, zero, scale = grouped_codes(weight, group, bits, symmetric)
        tensors = {
            "weight_packed": to_words(codes, bits),
            "weight_scale": scale.bfloat16() if size < 0 else scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        scale = tensors["weight_scale"].float()
        if not symmetric:
            tensors["weight_zero_point"] = to_words(zero.T, bits).T
        if ordered:
            tensors["weight_g_idx"] = group.int()
        return tensors, dense_of(codes, zero, scale, group)

    strategy = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return Case(ct_config(weights | {"actorder": "group" if ordered else None}, "pack-quantized"), write)


def ct_int8(asymmetric: bool = False) -> Case:
    def write(weight: Tensor) -> Stored:
        group = torch.zeros(weight.shape[1], dtype=torch.long)
        codes, zero, scale = grouped_codes(weight, group, 8, not asymmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        if asymmetric:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        return tensors, dense_of(codes, zero, scale, group)

    weights = {"num_bits": 8, "type": "int", "symmetric": not asymmetric, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Case(ct_config(weights, "int-quantized", inputs), write)


FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def ct_fp8(strategy: str, head: bool = False, **more: Any) -> Case:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [32, 16]

    def write(weight: Tensor) -> Stored:
        tensors, dense = fp8(weight, strategy, (32, 16))
        if strategy == "tensor":
            tensors |= {"weight_scale": tensors["weight_scale"].reshape(1), "input_scale": torch.tensor([0.02])}
        return tensors, dense

    ignore = {"ignore": []} if head else {}
    return Case(ct_config(weights, "float-quantized", FP8_INPUTS, **ignore, **more), write, head=head)


# -- e4m3 with one scale for a tensor, for output features or for blocks


def fp8(weight: Tensor, strategy: str, block: tuple[int, int], name: str = "weight_scale") -> Stored:
    out, inputs = weight.shape
    high, wide = {"tensor": (out, inputs), "channel": (1, inputs), "block": block}[strategy]
    scale = torch.zeros(-(-out // high), -(-inputs // wide))
    codes, dense = torch.zeros(out, inputs, dtype=torch.uint8), torch.zeros(out, inputs)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            area = (slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide))
            scale[row, column] = weight[area].abs().max() / 448
            rounded = (weight[area] / scale[row, column]).to(torch.float8_e4m3fn)
            codes[area], dense[area] = rounded.view(torch.uint8), rounded.float() * scale[row, column]
    stored = scale.reshape(()) if strategy == "tensor" else scale
    return {"weight": codes.view(torch.float8_e4m3fn), name: stored}, dense


def block_fp8(left: tuple[str, ...] = ()) -> Case:
    config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "modules_to_not_convert": ["lm_head", *left],
    }  # fmt: skip
    return Case(config, lambda weight: fp8(weight, "block", (32, 32), "weight_scale_inv"), left=left)


def tensor_fp8() -> Case:
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}

    def write(weight: Tensor) -> Stored:
        tensors, dense = fp8(weight, "tensor", (1, 1))
        return tensors | {"input_scale": torch.tensor(0.02)}, dense

    return Case(config, write)


def modelopt_fp8() -> Case:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.2.mlp*"]}
    config = {"producer": {"name": "modelopt", "version": "0"}, "quantization": inner, "quant_method": "modelopt"}
    scales = {}
    for i in range(3):
        scales[f"model.layers.{i}.self_attn.k_proj.k_scale"] = torch.tensor(0.01 * (i + 1))
        scales[f"model.layers.{i}.self_attn.v_proj.v_scale"] = torch.tensor(0.02 * (i + 1))
    return Case(config, tensor_fp8().write, left=("model.layers.2.mlp",), extra=scales)


# -- AutoAWQ and GPTQ


def awq(size: int, left: tuple[str, ...] = ()) -> Case:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(weight: Tensor) -> Stored:
        group = in_groups(weight.shape[1], size)
        codes, zero, scale = grouped_codes(weight, group, 4, symmetric=False)
        tensors = {
            "qweight": to_words(codes.T, 4, order),
            "qzeros": to_words(zero.T, 4, order),
            "scales": scale.T.half(),
        }
        return tensors, dense_of(codes, zero, scale, group)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return Case(config | {"modules_to_not_convert": list(left) or None}, write, left=left)


def gptq(bits: int, size: int, symmetric: bool, ordered: bool, form: str, head: bool = False) -> Case:
    def write(weight: Tensor) -> Stored:
        inputs = weight.shape[1]
        group = shuffled_groups(inputs, size, inputs) if ordered else in_groups(inputs, size)
        codes, zero, scale = grouped_codes(weight, group, bits, symmetric)
        qzeros = to_words(zero.T, bits)
        if form == "gptq":  # one less in every code, with borrows, as the library subtracts it
            ones = {4: 0x11111111, 8: 0x01010101}[bits]
            low = (qzeros.long() - ones) % 2**32
            qzeros = torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)
        tensors = {"qweight": to_words(codes, bits).T, "qzeros": qzeros, "scales": scale.T.half()}
        return tensors | {"g_idx": group.int()}, dense_of(codes, zero, scale, group)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": form, "lm_head": head,
    }  # fmt: skip
    return Case(config, write, head=head)


CASES: dict[str, Case] = {
    "ct fp8 tensor": ct_fp8("tensor"),
    "ct fp8 channel": ct_fp8("channel"),
    "ct fp8 block": ct_fp8("block"),
    "ct fp8 channel, head": ct_fp8("channel", head=True),
    "ct int8 channel": ct_int8(),
    "ct int8 channel asym": ct_int8(asymmetric=True),
    "ct w4 g32 sym": ct_packed(4, 32, symmetric=True),
    "ct w4 g32 asym": ct_packed(4, 32, symmetric=False),
    "ct w4 g16 actorder": ct_packed(4, 16, symmetric=True, ordered=True),
    "ct w4 g16 asym actorder": ct_packed(4, 16, symmetric=False, ordered=True),
    "ct w4 channel": ct_packed(4, -1, symmetric=True),
    "ct w8 g32 asym": ct_packed(8, 32, symmetric=False),
    "fp8 block": block_fp8(),
    "fp8 block, not converted": block_fp8(left=("model.layers.1.mlp",)),
    "fp8 tensor": tensor_fp8(),
    "modelopt fp8": modelopt_fp8(),
    "awq g32": awq(32),
    "awq one group": awq(-1),
    "awq, not converted": awq(16, left=("model.layers.0.self_attn",)),
    "gptq w4 g32 sym": gptq(4, 32, True, False, "gptq"),
    "gptq w4 g32 asym": gptq(4, 32, False, False, "gptq"),
    "gptq w4 g16 asym desc_act": gptq(4, 16, False, True, "gptq"),
    "gptq w4 g16 sym desc_act": gptq(4, 16, True, True, "gptq"),
    "gptq w4 one group, head": gptq(4, -1, True, False, "gptq", head=True),
    "gptq_v2 w4 g32 asym": gptq(4, 32, False, False, "gptq_v2"),
    "gptq_v2 w8 g16 sym desc_act": gptq(8, 16, True, True, "gptq_v2"),
    "gptq w8 g32 asym": gptq(8, 32, False, False, "gptq"),
}
