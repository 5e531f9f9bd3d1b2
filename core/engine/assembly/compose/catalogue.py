"""Which options exist, without Hydra: YAML files by search path, and the plugins' own names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.assembly.compose.text import failure_notes
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.errors import AssemblyError
from engine.contracts.slots import SLOTS


def conf_dir() -> Path:
    """The YAML that ships with the engine: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


class Catalogue:
    """The options of every group, and what is known about one."""

    def __init__(self, discovered: Discovered, config_dirs: Sequence[Path] = ()) -> None:
        self.searchpaths, folders = _search(discovered, config_dirs)
        self._folders = (conf_dir(), *folders)
        self._discovered = discovered

    def in_yaml(self, group: str) -> set[str]:
        return {file.stem for folder in self._folders for file in (folder / group).glob("*.yaml")}

    def options(self, group: str) -> tuple[str, ...]:
        return tuple(sorted(self.in_yaml(group) | set(self._discovered.names(group))))

    def notes(self, slot: str, name: str) -> str:
        """Failures that may explain why an option is missing."""
        return failure_notes(self._discovered, slot, name)

    def schema(self, slot: str, plugin: str) -> tuple[type[Any], Offer | None]:
        """The config dataclass of a plugin; the slot's base for ``auto`` and for what nobody offers."""
        offers = self._discovered.named(slot, plugin)
        return (offers[0].config_class, offers[0]) if offers else (SLOTS[slot].config, None)


def _search(discovered: Discovered, config_dirs: Sequence[Path]) -> tuple[list[str], list[Path]]:
    """Search paths after our own, and the folders they mean. Hydra ignores missing ones; we do not."""
    problems = [f"--config-dir {path}: no such directory" for path in config_dirs if not path.is_dir()]
    paths, folders = [f"file://{path.resolve()}" for path in config_dirs], list(config_dirs)
    for searchpath in discovered.searchpaths:
        folder = _folder(searchpath.path)
        if folder is None:
            problems.append(f"YAML folder {searchpath.path} of {searchpath.origin} does not exist")
        else:
            paths.append(searchpath.path)
            folders.append(folder)
    if problems:
        raise AssemblyError(problems)
    return paths, folders


def _folder(searchpath: str) -> Path | None:
    """The directory a search path means, if there is one."""
    scheme, _, where = searchpath.partition("://")
    candidates = [Path(where)]
    if scheme == "pkg":
        package, *inner = where.replace("/", ".").split(".")
        try:
            found = importlib.import_module(package)
        except ImportError:
            return None
        candidates = [Path(root, *inner) for root in getattr(found, "__path__", [])]
    return next((folder for folder in candidates if folder.is_dir()), None)
