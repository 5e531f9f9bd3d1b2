"""Checkpoints in the compressed-tensors layout (https://github.com/vllm-project/compressed-tensors), which vLLM reads.

``pack-quantized``: ``weight_packed`` int32 ``[out, in / (32 / bits)]``, the first code in the lowest bits, each stored
as ``code + 2 ** (bits - 1)``; ``weight_scale [out, groups]``; ``weight_shape`` int64 ``[2]``; with zero points
``weight_zero_point`` int32, packed along the outputs. ``int-quantized`` and ``float-quantized``: ``weight`` int8 or
float8_e4m3fn ``[out, in]`` and ``weight_scale`` float32 ``[out, 1]``; activations are rounded per token as they come.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tools.quantize.layer import COMPENSATED, Recipe
from torch import Tensor

from engine.contracts.quantizer import QuantizedWeight

SHARD_BYTES = 4 * 2**30
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "vocab.json")
ALSO_COPIED = ("merges.txt", "chat_template*", "*.jinja", "LICENSE*")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``out`` once everything is in it; nothing is left after a failure.

    Raises ``ValueError`` if ``out`` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists; nothing is overwritten: remove it or choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def part_tensors(name: str, weight: QuantizedWeight, dtype: torch.dtype, *, packed: bool) -> dict[str, Tensor]:
    """The tensors of one linear layer. ``dtype``: of a bias, and of the scales of packed weights."""
    codes, scale = weight.codes.cpu(), weight.scale.cpu()
    if packed:
        tensors = {
            f"{name}.weight_packed": pack(codes, weight.bits),
            f"{name}.weight_scale": scale.to(dtype),
            f"{name}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if weight.zero is not None:
            tensors[f"{name}.weight_zero_point"] = pack(weight.zero.cpu().T, weight.bits).T
    else:
        tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    if weight.bias is not None:
        tensors[f"{name}.bias"] = weight.bias.cpu().to(dtype)
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 ``[rows, columns] -> int32 [rows, ceil(columns / (32 / bits))]``."""
    per_word = 32 // bits
    wide = codes.to(torch.int64) + 2 ** (bits - 1)
    words = F.pad(wide, (0, -wide.shape[1] % per_word)).view(len(wide), -1, per_word)
    shifts = torch.arange(per_word) * bits
    joined = (words << shifts).sum(dim=2)
    return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)


def quantization_config(recipe: Recipe, head_bits: int | None, ignored: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``. ``head_bits``: of a packed vocabulary projection; ``None``: it is not
    quantized; ``ignored``: names of linear layers that are not quantized."""
    form, group = _group(recipe)
    groups = {"group_0": {"targets": ["Linear"], "format": form, **group}}
    if head_bits is not None:
        weights = _arguments(head_bits, "int", "channel")
        head = {"targets": ["re:.*lm_head$"], "format": "pack-quantized", "weights": weights}
        groups["group_1"] = {**head, "input_activations": None, "output_activations": None}
    forms = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    if recipe.method in ("smoothquant", "fp8"):
        kind = "float" if recipe.method == "fp8" else "int"
        activations = _arguments(8, kind, "token", dynamic=True)
        weights = _arguments(8, kind, "channel")
        form = f"{kind}-quantized"
        return form, {"weights": weights, "input_activations": activations, "output_activations": None}
    weights = _arguments(recipe.grid.bits, "int", "group", group_size=recipe.grid.group_size)
    weights["symmetric"] = recipe.grid.symmetric
    if recipe.method in COMPENSATED and recipe.by_activation:
        weights["actorder"] = "weight"
    return "pack-quantized", {"weights": weights, "input_activations": None, "output_activations": None}


def _arguments(bits: int, kind: str, strategy: str, group_size: int | None = None, dynamic: bool = False) -> Any:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }


def write_config(source: Path, folder: Path, section: Mapping[str, Any], *, untied: bool) -> None:
    """``config.json`` with the section, and the tokenizer's files."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = dict(section)
    if untied:
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in (*COPIED, *ALSO_COPIED):
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


class ShardWriter:
    """Tensors into safetensors files of about :data:`SHARD_BYTES`, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._waiting[name] = tensor
            self._bytes += tensor.nbytes
            if self._bytes >= SHARD_BYTES:
                self._flush()

    def close(self) -> int:
        """Write what is left, and the index. Returns the bytes of all tensors."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self._folder / _part(0)).rename(self._folder / "model.safetensors")
            return self._total
        names = {i: f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)}
        for i, name in names.items():
            (self._folder / _part(i)).rename(self._folder / name)
        weight_map = {tensor: names[i] for i, shard in enumerate(self._shards) for tensor in shard}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return self._total

    def _flush(self) -> None:
        if not self._waiting:
            return
        save_file(self._waiting, self._folder / _part(len(self._shards)), metadata={"format": "pt"})
        (self._folder / _part(len(self._shards))).chmod(0o666 & ~_umask())  # the library makes it private
        self._shards.append(list(self._waiting))
        self._total += self._bytes
        self._waiting, self._bytes = {}, 0


def _part(index: int) -> str:
    return f"part-{index}.safetensors"
