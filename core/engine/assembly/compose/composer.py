"""Hydra, set up with our YAML, the plugins' YAML and the plugins' dataclasses while it composes, and put back as it
was."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.assembly.compose.catalogue import Catalogue, conf_dir
from engine.assembly.compose.overrides import PRESET, Override, quoted
from engine.assembly.compose.text import first_lines
from engine.assembly.compose.typed import plain_values, structured
from engine.assembly.discovery import Discovered, Offer, PluginFailure
from engine.assembly.errors import AssemblyError
from engine.contracts.config import Settings
from engine.contracts.slots import SLOTS

SETTINGS_NODE = "engine_settings"
MOST_KEPT = 256
"""Compositions of this process."""

_composed: dict[Hashable, tuple[Any, Mapping[str, Any]]] = {}
_stored: dict[Hashable, dict[str, Any]] = {}
"""What Hydra's store holds of ours, by what decides it. Hydra copies what it loads."""


class Composer(Catalogue):
    """The shelf, and what Hydra composes from it."""

    def __init__(self, discovered: Discovered, parsed: Sequence[Override], config_dirs: Sequence[Path]) -> None:
        super().__init__(discovered, config_dirs)
        self._picked = _picked(parsed)

    def compose(self, groups: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
        """The composed tree, which nobody changes, and the option chosen for each group. Hydra takes longer than a
        tiny engine takes to start, so what it made of our own YAML is kept. Somebody else's folder may hold anything,
        and is read each time."""
        if self.searchpaths:
            return self._compose(groups)
        shelf = (self._schemas(), _own_files())
        key = (tuple(groups), shelf)
        if key not in _composed:
            if len(_composed) == MOST_KEPT:
                _composed.clear()
                _stored.clear()
            _composed[key] = self._compose(groups, shelf)
        return _composed[key]

    def _schemas(self) -> tuple[Hashable, ...]:
        """What decides the schema of every option."""
        offers = ((offer.slot, offer.qualified, offer.config_class) for offer in self._discovered.offers)
        return (*offers, *self._picked.items())

    def _compose(self, groups: Sequence[str], shelf: Hashable = None) -> tuple[Any, Mapping[str, Any]]:
        import yaml
        from hydra import compose
        from hydra.errors import HydraException
        from omegaconf import open_dict
        from omegaconf.errors import OmegaConfBaseException

        try:
            with self._hydra(shelf):
                root = compose("config", overrides=[self._searchpath_override(), *groups], return_hydra_config=True)
            choices = dict(root.hydra.runtime.choices)
            with open_dict(root):
                del root["hydra"]
            return root, choices
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise AssemblyError([f"the configuration does not compose: {first_lines(error)}"]) from error

    @contextmanager
    def _hydra(self, shelf: Hashable) -> Iterator[None]:
        """Hydra's process-wide singletons hold our configuration inside this block and are restored after it.
        ``shelf``: what its store holds is kept by that name; ``None``: it is not."""
        import hydra
        from hydra.conf import HydraConf
        from hydra.core.config_store import ConfigStore
        from hydra.core.global_hydra import GlobalHydra

        version = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
        store, instance = ConfigStore.instance(), GlobalHydra.instance()
        before_store, before_hydra = store.repo, instance.hydra
        others = {key: value for key, value in store.repo.items() if key not in (*SLOTS, PRESET, "hydra")}
        store.repo = others | _stored.get(shelf, {})
        instance.clear()
        try:
            with warnings.catch_warnings(), hydra.initialize_config_dir(str(conf_dir()), job_name="engine", **version):
                warnings.simplefilter("ignore")
                if shelf not in _stored:
                    # Nothing is launched or logged by Hydra: its own groups would take a third of the time.
                    store.store(group="hydra", name="config", node=HydraConf(defaults=["_self_"]), provider="engine")
                    store.store(SETTINGS_NODE, _root_schema(), package="_global_")
                    self._store_providers(store)
                    if shelf is not None:
                        _stored[shelf] = {key: node for key, node in store.repo.items() if key not in others}
                yield
        finally:
            store.repo = before_store
            GlobalHydra.instance().hydra = before_hydra

    def _store_providers(self, store: Any) -> None:
        """Each plugin's dataclass as option ``<slot>/<name>``, unless YAML of that name exists (Hydra would match the
        two by name, and differently in each version)."""
        for slot in SLOTS:
            for name in set(self._discovered.names(slot)) - self.in_yaml(slot):
                picked = self._picked.get(slot, "")
                offers = self._discovered.named(slot, picked) if picked.endswith(f":{name}") else ()
                offer = (offers or self._discovered.named(slot, name))[0]
                node = {"plugin": name, **_defaults_of(offer)}
                package = f"{slot}.{name}" if SLOTS[slot].many else slot
                store.store(group=slot, name=name, node=node, package=package, provider=str(offer.origin))

    def _searchpath_override(self) -> str:
        return "hydra.searchpath=[" + ",".join(quoted(path) for path in self.searchpaths) + "]"


def _own_files() -> tuple[tuple[str, int, int], ...]:
    """Path, modification time in ns and bytes of each: they change in a checkout that somebody works in."""
    files = sorted(conf_dir().rglob("*.yaml"))
    return tuple((str(file), (stat := file.lstat()).st_mtime_ns, stat.st_size) for file in files)


def _picked(parsed: Sequence[Override]) -> dict[str, str]:
    """``slot.plugin=dist:name`` by slot: decides whose schema an ambiguous name has."""
    return {
        one.key.partition(".")[0]: one.value
        for one in parsed
        if one.key.endswith(".plugin") and isinstance(one.value, str) and ":" in one.value
    }


def usable(discovered: Discovered) -> Discovered:
    """Without third parties' plugins whose config dataclass cannot be a schema: they are failures, like records that
    are wrong in themselves, so that they stop nobody who does not select them."""
    offers, failures = [], list(discovered.failures)
    for offer in discovered.offers:
        wrong = _schema_error(offer) if offer.is_third_party else ""
        if wrong:
            failures.append(PluginFailure(offer.origin, "provider", wrong, offer.slot, offer.name))
        else:
            offers.append(offer)
    return replace(discovered, offers=tuple(offers), failures=tuple(failures))


def _schema_error(offer: Offer) -> str:
    try:
        _defaults_of(offer)
    except Exception as error:  # a third party's dataclass may hold anything
        return f"config {offer.config_class.__name__} cannot be a schema: {first_lines(error)}"
    return ""


def _defaults_of(offer: Offer) -> dict[str, Any]:
    """A plugin's defaults in the form YAML would state them (enums by name)."""
    config_class: Any = offer.config_class
    return deepcopy(_plain_defaults(config_class))


@lru_cache(maxsize=256)
def _plain_defaults(config_class: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(structured(config_class), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _root_schema() -> dict[str, Any]:
    """The settings' defaults, and a place for every slot."""
    tree: dict[str, Any] = plain_values(structured(Settings))
    return tree | {slot: {} for slot in SLOTS}
