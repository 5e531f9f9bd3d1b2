"""A checkpoint's ``config.json`` in the engine's own words, read without torch and without running its code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.assembly.errors import AssemblyError
from engine.checkpoint.files import CheckpointError, clipped, read_json, shown
from engine.checkpoint.rope import read_reach, read_rope
from engine.checkpoint.values import Values
from engine.contracts.model import ModelFacts

BUNDLED = "bundled"
DTYPES = ("float32", "bfloat16", "float16")
_DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt")
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
QUANT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt writes what ``quantization_config`` says elsewhere."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")


def bundled_dir() -> Path:
    """Where the model that ships with the package lives."""
    return Path(__file__).resolve().parents[1] / "bundled"


def model_facts(path: str, name: str = "", *, download: bool = False) -> ModelFacts:
    """Facts of ``bundled``, a local directory or a hub id (``org/name`` or ``org/name@revision``).

    ``download``: a hub id that is not in the local cache may be fetched. Raises :class:`AssemblyError`.
    """
    folder = locate(path, download=download)
    try:
        config = read_json(folder / "config.json")
        generation = _read_optional(folder / "generation_config.json")
        _add_quantization(config, _read_optional(folder / QUANT_CONFIG))
        return facts_from_config(config, generation, str(folder), name or served_name(path))
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
        if not os.path.lexists(folder / "config.json"):
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


def facts_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], path: str, name: str) -> ModelFacts:
    """The facts a ``config.json`` states. Raises :class:`CheckpointError` naming the key that is missing or odd.

    ``auto_map`` (code in the checkpoint) is ignored: nothing from a checkpoint is ever executed.
    """
    values = Values(config)
    architectures = values.texts("architectures", "MAX_LISTED")
    if not architectures:
        raise CheckpointError("config.json has no 'architectures'")
    missing = [key for key in _REQUIRED if not values.has(key)]
    if missing:
        family = clipped(architectures[0])
        raise CheckpointError(f"config.json lacks {', '.join(missing)} ({family} is not a text decoder?)")
    hidden_size = values.whole("hidden_size", "MAX_HIDDEN_SIZE")
    heads = values.whole("num_attention_heads", "MAX_HEADS")
    head_dim = values.whole("head_dim", "MAX_HEAD_DIM", hidden_size // heads)
    kv_heads = values.whole("num_key_value_heads", "MAX_HEADS", heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    for key in _EXPERTS:
        values.whole(key, "MAX_EXPERTS", 0, least=0)
    stated = values.whole("max_position_embeddings", "MAX_POSITION", 2048, least=2)
    rope = read_rope(values, head_dim, stated)
    max_position = read_reach(stated, rope)
    windows = _layer_windows(values, max_position)
    vocab_size = values.whole("vocab_size", "MAX_VOCAB")
    bos = values.wholes("bos_token_id", "MAX_LISTED", largest="MAX_VOCAB")
    eos = [of.wholes("eos_token_id", "MAX_LISTED", largest="MAX_VOCAB") for of in (values, Values(generation))]
    return ModelFacts(
        path=path,
        name=name,
        architecture=architectures[0],
        hidden_size=hidden_size,
        num_layers=values.whole("num_hidden_layers", "MAX_LAYERS"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=values.whole("intermediate_size", "MAX_INTERMEDIATE_SIZE"),
        vocab_size=vocab_size,
        max_position=max_position,
        rms_norm_eps=values.number("rms_norm_eps", "MAX_EPS", 1e-6),
        rope=rope,
        tie_embeddings=values.flag("tie_word_embeddings", False),
        hidden_act=values.text("hidden_act", "silu"),
        sliding_window=next((window for window in windows if window is not None), None),
        layer_windows=windows,
        dtype=_dtype(values),
        quantization=_quantization(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys((*eos[0], *eos[1]))),
        raw=dict(config),
    )


def _layer_windows(values: Values, max_position: int) -> tuple[int | None, ...]:
    """Attention window by layer.

    ``layer_types`` decides where given. Else Qwen uses its window only if ``use_sliding_window``, from layer
    ``max_window_layers`` on; Llama never; everyone else (Mistral) in every layer once ``sliding_window`` is set.
    """
    layers = values.whole("num_hidden_layers", "MAX_LAYERS")
    family = values.text("model_type", "")
    qwen = family.startswith("qwen") or "use_sliding_window" in values.values
    unused = family == "llama" or (qwen and not values.flag("use_sliding_window", False))
    if unused or not values.has("sliding_window"):
        return (None,) * layers
    window = values.whole("sliding_window", "MAX_POSITION")
    if window >= max_position:
        return (None,) * layers
    if values.has("layer_types"):
        types = values.texts("layer_types", "MAX_LAYERS")
        if len(types) != layers:
            raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise CheckpointError(f"layer_types {clipped(sorted(unknown))} not supported")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = values.whole("max_window_layers", "MAX_LAYERS", 28, least=0) if qwen else 0
    return tuple(window if layer >= first else None for layer in range(layers))


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
