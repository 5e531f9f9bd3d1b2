"""A checkpoint's ``config.json`` in the engine's own words, read without torch and without running its code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.assembly.errors import AssemblyError
from engine.assembly.hub import from_hub
from engine.checkpoint.files import CheckpointError, clipped, read_json, shown
from engine.checkpoint.headers import GGUF, other_weights
from engine.checkpoint.values import Values
from engine.contracts.model import ModelConfig

BUNDLED = "bundled"
DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})
QUANT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt writes what ``quantization_config`` says elsewhere."""


def bundled_dir() -> Path:
    """Where the model that ships with the package lives."""
    return Path(__file__).resolve().parents[1] / "bundled"


def model_config(path: str, name: str = "", *, download: bool = False) -> ModelConfig:
    """Of ``bundled``, a local directory or a hub id (``org/name`` or ``org/name@revision``).

    ``download``: a hub id that is not in the local cache may be fetched. Raises :class:`AssemblyError`.
    """
    folder = locate(path, download=download)
    try:
        config = read_json(folder / "config.json")
        generation = _read_optional(folder / "generation_config.json")
        _add_quantization(config, _read_optional(folder / QUANT_CONFIG))
        return read_config(config, generation, str(folder), name or served_name(path))
    except CheckpointError as error:
        raise AssemblyError([f"model.path={path}: {error}"]) from error


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if os.path.lexists(file) else {}


def served_name(path: str) -> str:
    """The name under which a model is served when ``model.name`` is not set."""
    if path == BUNDLED or "/" not in path.rstrip("/"):
        return path
    return Path(path).resolve().name if Path(path).is_dir() else path.partition("@")[0]


def locate(path: str, *, download: bool = False) -> Path:
    """The local directory of a model. Raises :class:`AssemblyError` saying what would help."""
    if path == BUNDLED:
        folder = bundled_dir()
        if not (folder / "config.json").is_file():
            raise AssemblyError(
                [
                    f"model.path=bundled: this installation has no bundled model in {folder}; "
                    "make one with tools/train_demo_model.py or set model.path to a directory or hub id"
                ]
            )
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _with_config(path, folder.resolve())
    if folder.suffix == ".gguf":
        raise AssemblyError([f"model.path={path}: {GGUF}"])
    if folder.is_file():
        raise AssemblyError([f"model.path={path}: a file; expected the directory that config.json and weights are in"])
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise AssemblyError(
            [f"model.path={path}: no such directory; expected 'bundled', a directory, or a hub id such as org/name"]
        )
    return _with_config(path, from_hub(path, download=download))


def _with_config(path: str, folder: Path) -> Path:
    """The folder, if it may be a model's."""
    if not os.path.lexists(folder / "config.json"):
        why = other_weights(folder) or f"{folder} has no config.json (Hugging Face layout)"
        raise AssemblyError([f"model.path={path}: {why}"])
    return folder


def _add_quantization(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Put ModelOpt's own file into ``config``. Raises :class:`CheckpointError` where ``config`` says something else."""
    section = config.get("quantization_config")
    if not own:
        return
    if section is None:
        config["quantization_config"] = {"quant_method": "modelopt", **own}
        return
    named, stated = (_algorithm(of) for of in (own, section))
    if named is not None and stated is not None and named != stated:
        raise CheckpointError(
            f"{QUANT_CONFIG} says quant_algo={shown(named)} and quantization_config in config.json says "
            f"quant_algo={shown(stated)}; remove the one that is wrong"
        )


def _algorithm(quantization: Any) -> str | None:
    """``quant_algo``, wherever ModelOpt wrote it."""
    inner = quantization.get("quantization", quantization) if isinstance(quantization, Mapping) else None
    found = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    return str(found).upper() if found else None


def read_config(config: Mapping[str, Any], generation: Mapping[str, Any], path: str, name: str) -> ModelConfig:
    """What a ``config.json`` states, whatever the family. Raises :class:`CheckpointError` naming the key that is
    missing or odd.

    ``auto_map`` (code in the checkpoint) is ignored: nothing from a checkpoint is ever executed.
    """
    values = Values(config)
    architectures = values.texts("architectures", "MAX_LISTED")
    if not architectures:
        raise CheckpointError("config.json has no 'architectures'")
    return ModelConfig(
        path=path,
        name=name,
        architecture=architectures[0],
        quantization=_quantization(config),
        **_of_text(values, Values(generation)),
        raw=dict(config),
    )


def of_text(model: ModelConfig, config: Mapping[str, Any]) -> ModelConfig:
    """The model with ``config``, its part for text, as :attr:`~ModelConfig.raw`. What both parts state counts as the
    part for text has it, but for the tokens that end a text: those of both do. Raises :class:`CheckpointError`."""
    own = {key: value for key, value in config.items() if value is not None}
    if _DTYPE_KEYS & own.keys():
        own = dict.fromkeys(_DTYPE_KEYS) | own
    found = _of_text(Values({**model.raw, **own}), Values({"eos_token_id": list(model.eos_token_ids)}))
    return replace(model, raw=dict(config), **found)


def _of_text(values: Values, generation: Values) -> dict[str, Any]:
    bos = values.wholes("bos_token_id", "MAX_LISTED", largest="MAX_VOCAB")
    eos = [of.wholes("eos_token_id", "MAX_LISTED", largest="MAX_VOCAB") for of in (values, generation)]
    return {
        "dtype": _dtype(values),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(dict.fromkeys((*eos[0], *eos[1]))),
    }


def _dtype(values: Values) -> str:
    dtype = values.text("dtype", values.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {clipped(dtype)}: expected one of {', '.join(DTYPES)}")
    return dtype


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # Checkpoints of compressed-tensors from before it was part of transformers have the second name.
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise CheckpointError(f"quantization_config {clipped(quantization)}: expected an object")
    return quantization or None
