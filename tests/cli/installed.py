"""Packages on the path as an installer would put them there, without one."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path


def put_on_path(*folders: Path) -> None:
    """Write the metadata that the ``pyproject.toml`` of each folder stands for, and make it importable."""
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(exist_ok=True)
        name, version = project["name"], project["version"]
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = project["entry-points"].items()
        lines = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items()) for group, of in groups]
        (info / "entry_points.txt").write_text("".join(lines))
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def take_off_path(*folders: Path) -> None:
    for folder in folders:
        sys.path.remove(str(folder))
        for file in folder.glob("*.py"):
            sys.modules.pop(file.stem, None)
