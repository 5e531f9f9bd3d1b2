"""Models of a hub: found in the cache that all Hugging Face libraries share, or downloaded into it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from engine.assembly.errors import AssemblyError
from engine.checkpoint.files import CheckpointError, read_json

_SETTINGS, _WEIGHTS = ("*.json", "*.jinja", "*.txt"), "*.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+-)(\d+)(-of-)(\d+)(\.safetensors)")
_SURPRISES = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What the library raises where an answer is not what it takes for granted."""
_LOG_IN = "log in with 'hf auth login' or set HF_TOKEN"


def hub_cache() -> Path:
    """The Hugging Face cache of this user."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(os.path.expandvars(cache)).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def from_hub(path: str, *, download: bool) -> Path:
    """The folder of ``org/name`` or ``org/name@revision``. ``download``: what the cache lacks may be fetched. Raises
    :class:`AssemblyError`."""
    repo, _, given = path.partition("@")
    revision = given or "main"
    cached = _cached(repo, revision)
    if cached is not None and not _lacking(cached):
        return cached
    if not download:
        hint = f"hf download {repo}" + f" --revision {given}" * bool(given)
        there = f"{hub_cache()} has only a part of it" if cached else f"neither a directory nor in {hub_cache()}"
        raise AssemblyError([f"model.path={path}: {there}; fetch it with '{hint}' (engine serve does so itself)"])
    folder = _downloaded(path, repo, revision)
    if lacks := _lacking(folder):
        raise AssemblyError([f"model.path={path}: {folder} has no {lacks}; {_expected(lacks)}"])
    return folder


def _cached(repo: str, revision: str) -> Path | None:
    folder = hub_cache() / f"models--{repo.replace('/', '--')}"
    ref = folder / "refs" / revision
    commit = ref.read_text(errors="replace").strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _lacking(snapshot: Path) -> str:
    """A file that a download which was interrupted has not brought; empty: none."""
    for name in ("config.json", *_listed(snapshot), *_shards(snapshot)):
        if not (snapshot / name).is_file():
            return name
    return "" if any(snapshot.glob(_WEIGHTS)) else _WEIGHTS


def _listed(snapshot: Path) -> Iterator[str]:
    """Settings that the repository holds, where the library has noted that when it began to download."""
    noted = _read(snapshot.parents[1] / "trees" / f"{snapshot.name}.json", "files")
    yield from (name for name in noted if "/" not in name and any(fnmatch(name, each) for each in _SETTINGS))


def _shards(snapshot: Path) -> Iterator[str]:
    """Of the weights, by the index and by the names of those that are there."""
    yield from {name for name in _read(snapshot / _INDEX, "weight_map").values() if isinstance(name, str)}
    for file in snapshot.glob(_WEIGHTS):
        if shard := _SHARD.fullmatch(file.name):
            before, number, of, count, after = shard.groups()
            yield from (f"{before}{i:0{len(number)}}{of}{count}{after}" for i in range(1, int(count) + 1))


def _read(file: Path, key: str) -> dict[str, Any]:
    """The object under ``key`` of a file; empty where there is none, which whoever needs the file will say."""
    with suppress(CheckpointError):
        found = read_json(file).get(key) if file.is_file() else None
        return found if isinstance(found, dict) else {}
    return {}


def _expected(lacks: str) -> str:
    if lacks == _WEIGHTS:
        return "weights in other formats are not read: choose a repository or a revision with safetensors"
    return "expected the layout of Hugging Face" if lacks == "config.json" else "start again to download the rest"


def _downloaded(path: str, repo: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(repo, revision=revision, cache_dir=hub_cache(), allow_patterns=[_WEIGHTS, *_SETTINGS])
        )
    except Exception as error:  # a hub may answer anything, of which the library foresees a part
        raise AssemblyError([f"model.path={path}: cannot be downloaded: {_why(error, repo, revision)}"]) from error


def _why(error: Exception, repo: str, revision: str) -> str:
    """On one line, with what would help."""
    from huggingface_hub import constants, errors

    hub, of_its_own = constants.ENDPOINT, not isinstance(error, errors.LocalEntryNotFoundError)
    cause = error if of_its_own or error.__cause__ is None else error.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    said = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}".removesuffix(": ")
    match cause:
        case errors.GatedRepoError() if status == 403:
            return f"{hub}/{repo} is gated, and the account that you are logged in with has no access: ask for it there"
        case errors.GatedRepoError():
            return f"{hub}/{repo} is gated: accept its terms there, and {_LOG_IN}"
        case errors.RepositoryNotFoundError():
            return f"{hub} has no model {repo}, or a private one: check the name, or {_LOG_IN}"
        case errors.RevisionNotFoundError():
            return f"{hub}/{repo} has no revision {revision!r}: expected a branch, a tag or a whole commit hash"
        case errors.OfflineModeIsEnabled():
            return (
                f"HF_HUB_OFFLINE is set, and {hub_cache()} does not have all of it; unset it, or copy the model there"
            )
        case errors.HfHubHTTPError() if status is not None:
            return f"{hub} answers with status {status}" + (f"; {_LOG_IN}" if status in (401, 403) else "; try again")
        case errors.HFValidationError():
            return said.partition(": ")[2]
        case _ if isinstance(cause, (*_SURPRISES, errors.FileMetadataError)):
            return f"{hub} does not answer as a hub does ({said}); does HF_ENDPOINT or a proxy lead elsewhere?"
        case _ if of_its_own:
            return said
    return f"{hub} is not reached ({said}), and {hub_cache()} does not have all of it; set HF_ENDPOINT for another hub"
