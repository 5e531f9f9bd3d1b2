"""Tiny quantized checkpoints written by the libraries that people use, each with a dense copy made by that library.

    python write_with_library.py LIBRARY FOLDER [--tiny]

in an environment of that library (each pins others of its own, so they do not share one): ``llmcompressor``,
``compressed-tensors`` (0.12 at most), ``gptqmodel``, ``autoawq``, ``modelopt`` or ``transformers``. Every case becomes
``FOLDER/LIBRARY/CASE`` (the checkpoint) and ``CASE.dense`` beside it (the same weights dequantized by the library,
float32). ``compare_with_libraries.py`` then loads both with the engine. Needs no network and no GPU.

``--tiny`` writes smaller models of some cases, and instead of the dense copy the logits that transformers computes
from it: what lies in ``written/`` for ``test_written_by_libraries.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.08,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
TINY_CASES = (
    "ct-fp8-static", "ct-fp8-dynamic-head", "ct-fp8-block", "ct-fp8-kv", "ct-int8-w8a8", "ct-w4a16-asym-g32",
    "ct-w4a16-actorder-group-asym", "gptq-w4-g32-desc_act-asym", "gptq_v2-w4-g32-asym",
    "gptq_v2-w8-g64-desc_act-sym", "awq-g32", "modelopt-fp8-kv",
)  # fmt: skip
Dense = dict[str, Tensor]


def plain_model(folder: Path, dtype: torch.dtype) -> Path:
    """A random Llama, saved unquantized, whose inputs differ in magnitude (so that an activation order is one)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(torch.rand_like(tensor) * 2 + 0.1)
    model.save_pretrained(folder)
    _word_tokenizer(folder)
    return folder


def _word_tokenizer(folder: Path) -> None:
    """Some libraries want one beside the model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))
    names = {"unk_token": "w0", "pad_token": "w1", "eos_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def calibration() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SHAPE["vocab_size"], (16, 64), generator=generator).tolist()


def save_dense(case: Path, dense: Dense) -> None:
    """``case.dense``: the tensors of the checkpoint that are not quantized, and ``dense`` in place of the others."""
    folder = Path(f"{case}.dense")
    folder.mkdir(exist_ok=True)
    config = json.loads((case / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    stored: Dense = {}
    for file in case.glob("*.safetensors"):
        stored |= load_file(file)
    kept = {name: t for name, t in stored.items() if name.endswith(".weight") and t.is_floating_point()}
    tensors = {name: t.float() for name, t in kept.items() if t.element_size() > 1} | dense
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


# -- llm-compressor: the compressed-tensors format


def llmcompressor(folder: Path) -> None:
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    def rounded(scheme: str | None, **options: Any) -> Any:
        named = {"targets": "Linear", "scheme": scheme} if scheme else {}
        return QuantizationModifier(**(named | {"ignore": ["lm_head"]} | options))

    def groups(**weights: Any) -> dict[str, Any]:
        return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}}

    per_channel = groups(strategy="channel", symmetric=True)
    grouped32 = groups(strategy="group", group_size=32, symmetric=False)
    cases: dict[str, tuple[Any, torch.dtype]] = {
        "ct-fp8-static": (rounded("FP8"), torch.float32),
        "ct-fp8-dynamic": (rounded("FP8_DYNAMIC"), torch.float32),
        "ct-fp8-dynamic-bf16-scales": (rounded("FP8_DYNAMIC"), torch.bfloat16),
        "ct-fp8-dynamic-head": (rounded("FP8_DYNAMIC", ignore=[]), torch.float32),
        "ct-fp8-block": (rounded("FP8_BLOCK"), torch.float32),
        "ct-fp8-kv": (rounded("FP8_DYNAMIC", kv_cache_scheme={
            "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
        }), torch.float32),
        "ct-int8-w8a8": (rounded("W8A8"), torch.float32),
        "ct-w8a16": (rounded("W8A16"), torch.float32),
        "ct-w4a16": (rounded("W4A16"), torch.float32),
        "ct-w4a16-asym": (rounded("W4A16_ASYM"), torch.float32),
        "ct-w4a16-asym-g32": (rounded(None, **grouped32), torch.float32),
        "ct-w4a16-channel": (rounded(None, **per_channel), torch.float32),
        "ct-w4a16-ignore": (rounded("W4A16", ignore=["lm_head", "re:.*layers.1.mlp.*"]), torch.float32),
        "ct-w4a16-gptq-weight": (
            GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], actorder="weight"), torch.float32),
        "ct-w4a16-gptq-static": (
            GPTQModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"], actorder="static"), torch.float32),
    }  # fmt: skip
    for name, (recipe, dtype) in cases.items():
        attempt(folder / name, _compress, recipe, dtype)


def _compress(case: Path, recipe: Any, dtype: torch.dtype) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    plain = plain_model(case.with_suffix(".plain"), dtype)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    oneshot(model=model, dataset=Dataset.from_list(rows), recipe=recipe, max_seq_length=64, num_calibration_samples=16)
    model.save_pretrained(case, save_compressed=True)
    save_dense(case, _decompressed(case))


def _decompressed(case: Path) -> Dense:
    """With compressed-tensors: each layer's tensors and scheme to a weight."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(**json.loads((case / "config.json").read_text())["quantization_config"])
    stored = load_file(case / "model.safetensors")
    ((_, scheme),) = config.config_groups.items()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    dense = {}
    for name in sorted({name.rpartition(".")[0] for name in stored if name.endswith(".weight_scale")}):
        tensors = {key.rpartition(".")[2]: t for key, t in stored.items() if key.rpartition(".")[0] == name}
        tensors["weight_scale"] = tensors["weight_scale"].float()
        dense[f"{name}.weight"] = compressor.decompress(tensors, scheme)["weight"]
    return dense


# -- compressed-tensors up to 0.12: groups in activation order, which later versions no longer write


def compressed_tensors(folder: Path) -> None:
    for name, symmetric in (("ct-w4a16-actorder-group", True), ("ct-w4a16-actorder-group-asym", False)):
        attempt(folder / name, _in_order, symmetric)


def _in_order(case: Path, symmetric: bool) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    size = 32
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=size, symmetric=symmetric, actorder="group")
    compressor = PackedQuantizationCompressor()
    plain = plain_model(case.with_suffix(".plain"), torch.float32)
    stored, dense = load_file(plain / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        layer, weight = name.removesuffix(".weight"), stored.pop(name)
        # The inputs of q, k and v have one order, as have those of gate and up.
        rank = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        groups = [weight[:, rank // size == g] for g in range(weight.shape[1] // size)]
        low, high = (torch.stack([getattr(g, end)(1) for g in groups], 1) for end in ("amin", "amax"))
        scale, zero = calculate_qparams(low, high, args)
        index = (rank // size).int()
        made = compressor.compress_weight(weight, scale, args, zero, index)
        made |= {"weight_scale": scale, "weight_g_idx": index}
        stored |= {f"{layer}.{suffix}": tensor for suffix, tensor in made.items()}
        codes = quantize(weight, scale, zero, args, dtype=torch.int8, g_idx=index)
        dense[name] = dequantize(codes, scale, zero, args, g_idx=index)
    shutil.copytree(plain, case)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, case / "model.safetensors")
    quantization = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=args)},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    config = json.loads((case / "config.json").read_text())
    (case / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization.model_dump(mode="json")})
    )
    save_dense(case, dense)


# -- GPTQModel


def gptqmodel(folder: Path) -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it loads with two, also where there are only two cores
    for bits, group, order, symmetric, form in (
        (4, 128, False, True, "gptq"),
        (4, 128, True, True, "gptq"),
        (4, 32, True, False, "gptq"),
        (4, 32, False, False, "gptq_v2"),
        (4, 128, True, True, "gptq_v2"),
        (4, -1, False, True, "gptq"),
        (4, -1, True, False, "gptq_v2"),
        (8, 64, False, True, "gptq"),
        (8, 64, True, True, "gptq_v2"),
        (8, 64, True, False, "gptq_v2"),
    ):
        words = (form, f"w{bits}", f"g{group}", "desc_act" if order else "", "sym" if symmetric else "asym")
        name = "-".join(word for word in words if word)
        options = {"bits": bits, "group_size": group, "desc_act": order, "sym": symmetric, "format": form}
        options |= {} if group > 0 else {"act_group_aware": False}
        attempt(folder / name, _gptq, options)
    for name, more in (
        ("gptq-lm-head", {"lm_head": True}),
        ("gptq-dynamic", {"dynamic": {r"-:.*\.1\.mlp\..*": {}, r".*\.0\.mlp\.down.*": {"bits": 8, "group_size": 64}}}),
    ):
        attempt(folder / name, _gptq, {"bits": 4, "group_size": 128, **more})


def _gptq(case: Path, options: dict[str, Any]) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    plain = plain_model(case.with_suffix(".plain"), torch.float16)
    model = GPTQModel.load(str(plain), QuantizeConfig(**options, device="cpu", offload_to_disk=False))
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    model.quantize(rows, batch_size=4)
    model.save(str(case))
    save_dense(case, _gptq_dense(case))


def _gptq_dense(case: Path) -> Dense:
    """With the torch kernel of the library, on the scales as stored: it loads them rounded to bfloat16."""
    from gptqmodel import BACKEND, GPTQModel

    loaded = GPTQModel.load(str(case), backend=BACKEND.TORCH, device="cpu")
    stored, dense = load_file(case / "model.safetensors"), {}
    for name, module in loaded.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            module.scales = stored[f"{name}.scales"].float()
            dense[f"{name}.weight"] = module.dequantize_weight().T
    return dense


# -- AutoAWQ


def autoawq(folder: Path) -> None:
    for name, group, left in (
        ("awq-g128", 128, None),
        ("awq-g32", 32, None),
        ("awq-channel", -1, None),
        ("awq-not-converted", 64, ["layers.1.mlp"]),
    ):
        attempt(folder / name, _awq, group, left)


def _awq(case: Path, group: int, left: list[str] | None) -> None:
    """Layers of AutoAWQ's gemm class put in place of the linear ones; scales by its own pseudo quantization."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoModelForCausalLM

    plain = plain_model(case.with_suffix(".plain"), torch.float16)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
    dense = {}
    for name, module in list(model.model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or any(entry in f"model.{name}" for entry in left or ()):
            continue
        size = group if group > 0 else module.in_features
        scales, zeros = _min_max(module.weight.data, size)
        module.weight.data = _rounded(module.weight.data, scales, zeros, size)
        packed = WQLinear_GEMM.from_linear(module, 4, size, False, scales.T.contiguous(), zeros.T.contiguous())
        parent, _, leaf = name.rpartition(".")
        setattr(model.model.get_submodule(parent), leaf, packed)
        weight = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, size)
        dense[f"model.{name}.weight"] = weight.T
    model.save_pretrained(case, state_dict=model.state_dict())
    config = json.loads((case / "config.json").read_text())
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    config["quantization_config"] = quantization | {"modules_to_not_convert": left}
    (case / "config.json").write_text(json.dumps(config))
    save_dense(case, dense)


def _min_max(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, size))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low).clamp(min=1e-5) / 15).half()
    return scales, (-(low / scales.float()).round()).clamp(0, 15).half()


def _rounded(weight: Tensor, scales: Tensor, zeros: Tensor, size: int) -> Tensor:
    groups, scale, zero = weight.float().unflatten(1, (-1, size)), scales.float()[..., None], zeros.float()[..., None]
    return (((groups / scale).round() + zero).clamp(0, 15) - zero).mul(scale).flatten(1).half()


# -- ModelOpt


def modelopt(folder: Path) -> None:
    import modelopt.torch.quantization as mtq

    cases = {
        "modelopt-fp8": mtq.FP8_DEFAULT_CFG,
        "modelopt-fp8-channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "modelopt-fp8-block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    }
    for name, config in cases.items():
        attempt(folder / name, _modelopt, config, False)
    attempt(folder / "modelopt-fp8-kv", _modelopt, mtq.FP8_DEFAULT_CFG, True)


def _modelopt(case: Path, config: Any, kv: bool) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    plain = plain_model(case.with_suffix(".plain"), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    rows = torch.tensor(calibration())
    if kv:
        config = mtq.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    model = mtq.quantize(model, config, lambda m: m(rows))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(case))
    save_dense(case, _exported(load_file(case / "model.safetensors")))


def _exported(stored: Dense) -> Dense:
    """With ModelOpt's FP8 tensor. Not what it rounded to before exporting: that joins scales of fused layers."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    dense = {}
    for name, weight in stored.items():
        if weight.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale"].float()
            blocks = {"block_sizes": {0: 128, 1: 128}} if scale.dim() == 4 else {}
            scale = scale[:, 0, :, 0] if blocks else scale if scale.dim() == 0 else scale[:, None]
            tensor = FP8QTensor(weight.shape, torch.float32, weight)
            dense[name] = tensor.dequantize(torch.float32, scale=scale, **blocks)
    return dense


# -- transformers: FP8 in blocks, as DeepSeek-V3 and Qwen3 have it


def transformers(folder: Path) -> None:
    """transformers writes this format on a GPU only: written here from its description, dequantized by it."""
    for name, left in (("fp8-block", []), ("fp8-block-not-converted", ["model.layers.1.mlp"])):
        attempt(folder / name, _fp8, left)


def _fp8(case: Path, left: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    plain = plain_model(case.with_suffix(".plain"), torch.bfloat16)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if not any(name.startswith(entry) for entry in left):
            tensors[name], tensors[f"{name}_scale_inv"] = _blocks(tensors[name].float())
    shutil.copytree(plain, case)
    save_file(tensors, case / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((case / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *left],
    }  # fmt: skip
    (case / "config.json").write_text(json.dumps(config))
    save_dense(case, AutoModelForCausalLM.from_pretrained(case, dtype=torch.float32).state_dict())


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 ``[out, in]`` and a float32 scale for every 128 x 128 weights."""
    out, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 128, 0, -out % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:out, :inputs]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale


LIBRARIES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "llmcompressor": (llmcompressor, ("llmcompressor", "compressed-tensors")),
    "compressed-tensors": (compressed_tensors, ("compressed-tensors",)),
    "gptqmodel": (gptqmodel, ("gptqmodel",)),
    "autoawq": (autoawq, ("autoawq",)),
    "modelopt": (modelopt, ("nvidia-modelopt",)),
    "transformers": (transformers, ("transformers",)),
}


def attempt(case: Path, write: Callable[..., None], *how: Any) -> None:
    """One case that fails leaves the others to be written."""
    is_tiny = "--tiny" in sys.argv
    if is_tiny and case.name not in TINY_CASES:
        return
    shutil.rmtree(case, ignore_errors=True)
    try:
        write(case, *how)
        if is_tiny:
            _only_logits(case)
        print(f"{case.name}: written", flush=True)
    except Exception as error:
        shutil.rmtree(case, ignore_errors=True)
        print(f"{case.name}: {type(error).__name__}: {error}", flush=True)


def _only_logits(case: Path) -> None:
    """In place of ``case.dense``: the logits that transformers has for its weights, in ``logits.safetensors``."""
    from transformers import AutoModelForCausalLM

    dense, tokens = Path(f"{case}.dense"), torch.arange(SHAPE["vocab_size"])[None, ::2]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)(tokens).logits[0]
    save_file({"tokens": tokens[0].contiguous(), "logits": found.contiguous()}, case / "logits.safetensors")
    for other in (dense, case.with_suffix(".plain")):
        shutil.rmtree(other)
    kept = ("config.json", "hf_quant_config.json", "model.safetensors", "logits.safetensors")
    for file in case.iterdir():
        if file.name not in kept:
            file.unlink()


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[2])
    if "--tiny" in sys.argv:
        SHAPE.update(TINY)
    write, packages = LIBRARIES[library]
    (folder / library).mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    (folder / library / "versions.txt").write_text(versions)
    write(folder / library)


if __name__ == "__main__":
    main()
