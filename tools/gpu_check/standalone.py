"""The engine from a checkout that nobody installed: its source folders and, for its plugins, its metadata."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP = "engine.plugins.v1"


def is_installed() -> bool:
    """Whether some distribution offers the engine's own plugins."""
    return any(entry.value.startswith("engine_plugins.") for entry in importlib.metadata.entry_points(group=GROUP))


def missing_packages() -> list[str]:
    """Distributions that the project requires and this Python lacks."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in project["dependencies"]]
    return [name for name in names if not is_there(name)]


def is_there(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write_metadata(folder: Path) -> Path:
    """What an installation would leave beside the sources, for ``importlib.metadata``: name, version, entry points."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in project["entry-points"][GROUP].items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def source_paths(scratch: Path) -> list[str]:
    """What to put in front of the import path: this checkout's sources, so that they are what is checked."""
    paths = [str(REPOSITORY / "core"), str(REPOSITORY / "plugins")]
    metadata = scratch / "metadata"
    # Once written and on the path it looks like an installation, to this process too.
    if is_installed() and not metadata.exists():
        return paths
    return [*paths, str(write_metadata(metadata))]


def child_environment(scratch: Path, **extra: str) -> dict[str, str]:
    """The environment of sections and of the servers they start."""
    given = os.environ.get("PYTHONPATH")
    paths = [*source_paths(scratch), str(REPOSITORY / "tools"), str(REPOSITORY), *([given] if given else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **extra}
