"""Hydra, set up with our YAML, the plugins' YAML and the plugins' dataclasses, and put back as it was."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.assembly.compose.overrides import PRESET, Override, quoted
from engine.assembly.compose.text import failure_notes, first_lines
from engine.assembly.compose.typed import plain_values, structured
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.errors import AssemblyError
from engine.contracts import MULTI_SLOTS, SLOTS
from engine.contracts.config import SLOT_CONFIGS, Settings

SETTINGS_NODE = "engine_settings"


def conf_dir() -> Path:
    """The YAML that ships with the engine: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


class Shelf:
    """Which options exist: YAML files by search path, and the plugins' own names. Needs no Hydra."""

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
        return (offers[0].config_class, offers[0]) if offers else (SLOT_CONFIGS[slot], None)


class Library(Shelf):
    """The shelf, with Hydra set up to compose from it."""

    def compose(self, groups: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """The composed tree, and the option chosen for each group."""
        import yaml
        from hydra import compose
        from hydra.errors import HydraException
        from omegaconf import open_dict
        from omegaconf.errors import OmegaConfBaseException

        try:
            root = compose("config", overrides=[self._searchpath_override(), *groups], return_hydra_config=True)
            choices = dict(root.hydra.runtime.choices)
            with open_dict(root):
                del root["hydra"]
            return root, choices
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise AssemblyError([f"the configuration does not compose: {first_lines(error)}"]) from error

    def _searchpath_override(self) -> str:
        return "hydra.searchpath=[" + ",".join(quoted(path) for path in self.searchpaths) + "]"


@contextmanager
def open_library(discovered: Discovered, parsed: Sequence[Override], config_dirs: Sequence[Path]) -> Iterator[Library]:
    """Hydra's process-wide singletons hold our configuration inside this block and are restored after it."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    version = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
    library = Library(discovered, config_dirs)
    store, instance = ConfigStore.instance(), GlobalHydra.instance()
    before_store, before_hydra = store.repo, instance.hydra
    store.repo = {key: value for key, value in store.repo.items() if key not in (*SLOTS, PRESET)}
    instance.clear()
    try:
        with warnings.catch_warnings(), hydra.initialize_config_dir(str(conf_dir()), job_name="engine", **version):
            warnings.simplefilter("ignore")
            store.store(SETTINGS_NODE, _root_schema(), package="_global_")
            _store_providers(store, library, discovered, _picked(parsed))
            yield library
    finally:
        store.repo = before_store
        GlobalHydra.instance().hydra = before_hydra


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


def _picked(parsed: Sequence[Override]) -> dict[str, str]:
    """``slot.plugin=dist:name`` by slot: decides whose schema an ambiguous name has."""
    return {
        one.key.partition(".")[0]: one.value
        for one in parsed
        if one.key.endswith(".plugin") and isinstance(one.value, str) and ":" in one.value
    }


def _store_providers(store: Any, library: Shelf, discovered: Discovered, picked: Mapping[str, str]) -> None:
    """Each plugin's dataclass as option ``<slot>/<name>``, unless YAML of that name exists (Hydra would match the
    two by name, and differently in each version)."""
    for slot in SLOTS:
        for name in set(discovered.names(slot)) - library.in_yaml(slot):
            offers = discovered.named(slot, picked[slot]) if picked.get(slot, "").endswith(f":{name}") else ()
            offer = (offers or discovered.named(slot, name))[0]
            node = {"plugin": name, **_defaults_of(offer)}
            package = f"{slot}.{name}" if slot in MULTI_SLOTS else slot
            store.store(group=slot, name=name, node=node, package=package, provider=str(offer.origin))


def _defaults_of(offer: Offer) -> dict[str, Any]:
    """A plugin's defaults in the form YAML would state them (enums by name)."""
    from omegaconf import OmegaConf

    try:
        plain = OmegaConf.to_container(structured(offer.config_class), enum_to_str=True)
    except Exception as error:  # a third party's dataclass may hold anything; its author is named
        who = f"{offer.slot}={offer.name} of {offer.origin}"
        raise AssemblyError([f"{who}: its config dataclass cannot be a schema: {first_lines(error)}"]) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _root_schema() -> dict[str, Any]:
    """The settings' defaults, and a place for every slot."""
    tree: dict[str, Any] = plain_values(structured(Settings))
    return tree | {slot: {} for slot in SLOTS}
