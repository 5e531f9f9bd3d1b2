"""Hydra, set up with our YAML, the plugins' YAML and the plugins' dataclasses, and put back as it was."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.assembly.compose.overrides import PRESET, Override
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


class Library:
    """Hydra, initialised with our YAML, the plugins' YAML and the plugins' dataclasses."""

    def __init__(self, loader: Any, searchpath: str, discovered: Discovered) -> None:
        self._loader = loader
        self._searchpath = searchpath
        self._discovered = discovered
        self._options: dict[str, tuple[str, ...]] = {}

    def options(self, group: str) -> tuple[str, ...]:
        if group not in self._options:
            names = self._loader.get_group_options(group, overrides=[self._searchpath])
            self._options[group] = tuple(sorted(names))
        return self._options[group]

    def notes(self, slot: str, name: str) -> str:
        """Failures that may explain why an option is missing."""
        return failure_notes(self._discovered, slot, name)

    def schema(self, slot: str, plugin: str) -> tuple[type[Any], Offer | None]:
        """The config dataclass of a plugin; the slot's base for ``auto`` and for what nobody offers."""
        offers = self._discovered.named(slot, plugin)
        return (offers[0].config_class, offers[0]) if offers else (SLOT_CONFIGS[slot], None)

    def compose(self, groups: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """The composed tree, and the option chosen for each group."""
        import yaml
        from hydra import compose
        from hydra.errors import HydraException
        from omegaconf import open_dict
        from omegaconf.errors import OmegaConfBaseException

        try:
            root = compose("config", overrides=[self._searchpath, *groups], return_hydra_config=True)
            choices = dict(root.hydra.runtime.choices)
            with open_dict(root):
                del root["hydra"]
            return root, choices
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise AssemblyError([f"the configuration does not compose: {first_lines(error)}"]) from error


@contextmanager
def open_library(discovered: Discovered, parsed: Sequence[Override], config_dirs: Sequence[Path]) -> Iterator[Library]:
    """Hydra's process-wide singletons hold our configuration inside this block and are restored after it."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    version = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
    searchpath = "hydra.searchpath=[" + ",".join(_quoted(path) for path in _paths(discovered, config_dirs)) + "]"
    store, instance = ConfigStore.instance(), GlobalHydra.instance()
    before_store, before_hydra = store.repo, instance.hydra
    store.repo = {key: value for key, value in store.repo.items() if key not in (*SLOTS, PRESET)}
    instance.clear()
    try:
        with warnings.catch_warnings(), hydra.initialize_config_dir(str(conf_dir()), job_name="engine", **version):
            warnings.simplefilter("ignore")
            loader = GlobalHydra.instance().config_loader()
            store.store(SETTINGS_NODE, _root_schema(), package="_global_")
            _store_providers(store, loader, searchpath, discovered, _picked(parsed))
            yield Library(loader, searchpath, discovered)
    finally:
        store.repo = before_store
        GlobalHydra.instance().hydra = before_hydra


def _paths(discovered: Discovered, config_dirs: Sequence[Path]) -> list[str]:
    """Search paths after our own. Hydra ignores missing ones; we do not."""
    missing = [str(path) for path in config_dirs if not path.is_dir()]
    if missing:
        raise AssemblyError([f"--config-dir {path}: no such directory" for path in missing])
    problems = [
        f"YAML folder {path.path} of {path.origin} does not exist"
        for path in discovered.searchpaths
        if not _exists(path.path)
    ]
    if problems:
        raise AssemblyError(problems)
    return [f"file://{path.resolve()}" for path in config_dirs] + [path.path for path in discovered.searchpaths]


def _exists(path: str) -> bool:
    scheme, _, where = path.partition("://")
    if scheme == "file":
        return Path(where).is_dir()
    package, *inner = where.replace("/", ".").split(".")
    try:
        found = importlib.import_module(package)
    except ImportError:
        return False
    return any(Path(root, *inner).is_dir() for root in getattr(found, "__path__", []))


def _quoted(path: str) -> str:
    return "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _picked(parsed: Sequence[Override]) -> dict[str, str]:
    """``slot.plugin=dist:name`` by slot: decides whose schema an ambiguous name has."""
    return {
        one.key.partition(".")[0]: one.value
        for one in parsed
        if one.key.endswith(".plugin") and isinstance(one.value, str) and ":" in one.value
    }


def _store_providers(
    store: Any, loader: Any, searchpath: str, discovered: Discovered, picked: Mapping[str, str]
) -> None:
    """Each plugin's dataclass as option ``<slot>/<name>``, unless YAML of that name exists (Hydra would match the
    two by name, and differently in each version)."""
    for slot in SLOTS:
        in_yaml = set(loader.get_group_options(slot, overrides=[searchpath]))
        for name in set(discovered.names(slot)) - in_yaml:
            offers = discovered.named(slot, picked[slot]) if picked.get(slot, "").endswith(f":{name}") else ()
            offer = (offers or discovered.named(slot, name))[0]
            node = {"plugin": name, **_defaults_of(offer)}
            package = f"{slot}.{name}" if slot in MULTI_SLOTS else slot
            store.store(group=slot, name=name, node=node, package=package, provider=str(offer.origin))


def _defaults_of(offer: Offer) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = plain_values(structured(offer.config_class))
    except Exception as error:  # a third party's dataclass may hold anything; its author is named
        who = f"{offer.slot}={offer.name} of {offer.origin}"
        raise AssemblyError([f"{who}: its config dataclass cannot be a schema: {first_lines(error)}"]) from error
    return plain


def _root_schema() -> dict[str, Any]:
    """The settings' defaults, and a place for every slot."""
    tree: dict[str, Any] = plain_values(structured(Settings))
    return tree | {slot: {} for slot in SLOTS}
