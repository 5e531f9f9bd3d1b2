"""A checkpoint's ``config.json`` in the engine's own words, read without torch and without running its code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.assembly.errors import AssemblyError
from engine.contracts.model import ModelFacts, RopeFacts

BUNDLED = "bundled"
DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt")
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
QUANT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt writes what ``quantization_config`` says elsewhere."""
_NEEDS_ORIGINAL = ("dynamic", "yarn", "llama3", "longrope")


def bundled_dir() -> Path:
    """Where the model that ships with the package lives."""
    return Path(__file__).resolve().parents[1] / "bundled"


def model_facts(path: str, name: str = "", *, download: bool = False) -> ModelFacts:
    """Facts of ``bundled``, a local directory or a hub id (``org/name`` or ``org/name@revision``).

    ``download``: a hub id that is not in the local cache may be fetched. Raises :class:`AssemblyError`.
    """
    folder = locate(path, download=download)
    config = _read_json(folder / "config.json", path)
    generation: Mapping[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder / "generation_config.json", path)
    if (folder / QUANT_CONFIG).is_file():
        _add_quantization(config, _read_json(folder / QUANT_CONFIG, path), path)
    try:
        return facts_from_config(config, generation, str(folder), name or served_name(path))
    except ValueError as error:
        raise AssemblyError([f"model.path={path}: {error}"]) from error


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
        if not (folder / "config.json").is_file():
            raise AssemblyError([f"model.path={path}: the directory has no config.json (Hugging Face layout)"])
        return folder.resolve()
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise AssemblyError(
            [f"model.path={path}: no such directory; expected 'bundled', a directory, or a hub id such as org/name"]
        )
    return _from_hub(path, download)


def hub_cache() -> Path:
    """The Hugging Face cache of this user."""
    cache = os.environ.get("HF_HUB_CACHE")
    if cache:
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def _from_hub(path: str, download: bool) -> Path:
    repo, _, revision = path.partition("@")
    cached = _cached_snapshot(repo, revision or "main")
    if cached is not None:
        return cached
    hint = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    if not download:
        raise AssemblyError(
            [
                f"model.path={path}: neither a directory nor in {hub_cache()}; "
                f"fetch it with '{hint}' (engine serve does so itself)"
            ]
        )
    return _download(path, repo, revision or None, hint)


def _cached_snapshot(repo: str, revision: str) -> Path | None:
    folder = hub_cache() / f"models--{repo.replace('/', '--')}"
    ref = folder / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    complete = (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors"))
    return snapshot if complete else None


def _download(path: str, repo: str, revision: str | None, hint: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(_DOWNLOADED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise AssemblyError([f"model.path={path}: cannot download: {reason[0]}; try '{hint}'"]) from error


def _read_json(file: Path, path: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AssemblyError([f"model.path={path}: cannot read {file.name}: {error}"]) from error
    if not isinstance(value, dict):
        raise AssemblyError([f"model.path={path}: {file.name} is not a JSON object"])
    return value


def _add_quantization(config: dict[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Put ModelOpt's own file into ``config``. Raises :class:`AssemblyError` where ``config`` says something else."""
    section = config.get("quantization_config")
    if section is None:
        config["quantization_config"] = {"quant_method": "modelopt", **own}
        return
    named, stated = (_algorithm(of) for of in (own, section))
    if named is not None and stated is not None and named != stated:
        raise AssemblyError(
            [
                f"model.path={path}: {QUANT_CONFIG} says quant_algo={named} and quantization_config in config.json "
                f"says quant_algo={stated}; remove the one that is wrong"
            ]
        )


def _algorithm(quantization: Any) -> str | None:
    """``quant_algo``, wherever ModelOpt wrote it."""
    inner = quantization.get("quantization", quantization) if isinstance(quantization, Mapping) else None
    found = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    return str(found).upper() if found else None


def facts_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], path: str, name: str) -> ModelFacts:
    """The facts a ``config.json`` states. Raises ``ValueError`` naming the key that is missing or odd.

    ``auto_map`` (code in the checkpoint) is ignored: nothing from a checkpoint is ever executed.
    """
    architectures = config.get("architectures") or []
    if not architectures:
        raise ValueError("config.json has no 'architectures'")
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)} ({architectures[0]} is not a text decoder?)")
    heads = int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    stated = int(config.get("max_position_embeddings") or 2048)
    rope = _rope(config, int(head_dim), stated)
    max_position = _max_position(stated, rope)
    windows = _layer_windows(config, max_position)
    return ModelFacts(
        path=path,
        name=name,
        architecture=str(architectures[0]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        hidden_act=str(config.get("hidden_act", "silu")),
        sliding_window=next((window for window in windows if window is not None), None),
        layer_windows=windows,
        dtype=_dtype(config),
        quantization=_quantization(config),
        bos_token_id=_first_id(config.get("bos_token_id")),
        eos_token_ids=_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        raw=dict(config),
    )


def _rope(config: Mapping[str, Any], head_dim: int, stated: int) -> RopeFacts:
    """Both spellings: ``rope_theta`` + ``rope_scaling``, and the newer ``rope_parameters``."""
    given = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("rope_parameters that differ by layer type are not supported")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r}: expected one of {', '.join(ROPE_KINDS)}")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    known = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    params = {key: value for key, value in given.items() if key not in known}
    if kind in ("linear", "dynamic", "yarn", "llama3") and "factor" not in params:
        raise ValueError(f"rope type {kind!r} has no 'factor'")
    if kind in _NEEDS_ORIGINAL:
        original = config.get("original_max_position_embeddings") or stated
        if params.get("original_max_position_embeddings") is None:
            params["original_max_position_embeddings"] = original
        params.setdefault("max_position_embeddings", stated)
    rotary_dim = None if partial == 1.0 else int(head_dim * partial)
    return RopeFacts(theta=theta, kind=kind, rotary_dim=rotary_dim, params=params)


def _max_position(stated: int, rope: RopeFacts) -> int:
    """Positions the rotation reaches. Scaled kinds state the length before scaling, except llama3 and longrope."""
    if rope.kind in ("linear", "dynamic"):
        return int(stated * float(rope.params["factor"]))
    if rope.kind == "yarn":
        return max(stated, int(rope.params["original_max_position_embeddings"] * float(rope.params["factor"])))
    return stated


def _layer_windows(config: Mapping[str, Any], max_position: int) -> tuple[int | None, ...]:
    """Attention window by layer.

    ``layer_types`` decides where given. Else Qwen uses its window only if ``use_sliding_window``, from layer
    ``max_window_layers`` on; Llama never; everyone else (Mistral) in every layer once ``sliding_window`` is set.
    """
    layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    family = str(config.get("model_type", ""))
    qwen = family.startswith("qwen") or "use_sliding_window" in config
    if family == "llama" or (qwen and not config.get("use_sliding_window", False)):
        window = None
    if window is None or window >= max_position:
        return (None,) * layers
    types = config.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise ValueError(f"layer_types has {len(types)} entries for {layers} layers")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ValueError(f"layer_types {', '.join(sorted(unknown))} not supported")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    first = int(config.get("max_window_layers", 28)) if qwen else 0
    return tuple(int(window) if layer >= first else None for layer in range(layers))


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return dtype


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # Checkpoints of compressed-tensors from before it was part of transformers have the second name.
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config {quantization!r}: expected an object")
    return quantization or None


def _ids(*values: Any) -> tuple[int, ...]:
    """Token ids from several keys, each an int, a list or null, without repeats."""
    found: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)


def _first_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None
