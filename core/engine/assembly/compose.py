"""From overrides to plain settings and one selection per slot: the only module that knows Hydra and OmegaConf.

Hydra's grammar reads the overrides and Hydra composes the groups (defaults, presets, variants); then each group's
values are merged onto its plugin's config dataclass, and value overrides are applied one by one so that every
mistake is found in one go. What leaves this module is plain data.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.assembly import values
from engine.assembly.discovery import Discovered, Offer
from engine.assembly.errors import AssemblyError, listing, nearest
from engine.contracts import MULTI_SLOTS, SLOTS
from engine.contracts.config import SLOT_CONFIGS, PluginSettings, Settings

AUTO = "auto"
PRESET = "preset"
SETTINGS_NODE = "engine_settings"
SETTING_KEYS = tuple(entry.name for entry in dataclasses.fields(Settings))
ROOT_KEYS = (*SETTING_KEYS, *SLOTS)


@dataclass(frozen=True, slots=True)
class Selection:
    """What the configuration asks of one slot."""

    requested: str
    """The option: a plugin's name, a variant's name or ``auto``."""
    plugin: str
    """``name`` or ``dist:name``, or ``auto``."""
    config: Mapping[str, Any]
    """Plain values for the plugin's config dataclass; with ``auto`` only those that were set."""
    candidates: tuple[str, ...] = ()
    """With ``auto``: plugins in order of preference."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration as plain data."""

    settings: Settings
    selections: Mapping[str, tuple[Selection, ...]]
    presets: tuple[str, ...] = ()

    def tree(self) -> dict[str, Any]:
        """The whole configuration as nested plain values, as ``engine config`` prints it."""
        tree: dict[str, Any] = dict(values.to_plain(self.settings))
        for slot, chosen in self.selections.items():
            nodes = {pick.requested: _tree_of(pick) for pick in chosen}
            tree[slot] = nodes if slot in MULTI_SLOTS else next(iter(nodes.values()))
        return tree


def _tree_of(pick: Selection) -> dict[str, Any]:
    extra = {"candidates": list(pick.candidates)} if pick.plugin == AUTO else {}
    return {"plugin": pick.plugin, **extra, **pick.config}


def conf_dir() -> Path:
    """The YAML that ships with the engine: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def plugin_settings(overrides: Sequence[str]) -> PluginSettings:
    """``plugins.*`` from the overrides alone: they decide what is loaded, so they are needed before composing.

    Raises :class:`AssemblyError`.
    """
    relevant = [text for text in overrides if text.lstrip("+").startswith("plugins.")]
    if not relevant:
        return PluginSettings()
    parsed, problems = _parse(relevant)
    config = _structured(PluginSettings)
    for one in parsed:
        problems += _apply(config, one.key.removeprefix("plugins."), one, "plugins", one.key)
    if problems:
        raise AssemblyError(problems)
    built: PluginSettings = values.build(PluginSettings, _plain(config))
    return built


def compose(overrides: Sequence[str], discovered: Discovered, config_dirs: Sequence[Path] = ()) -> Composed:
    """Compose the configuration. Raises :class:`AssemblyError` with every mistake it found."""
    parsed, problems = _parse(overrides)
    with _hydra(discovered, parsed, config_dirs) as library:
        request = _sort(parsed, library)
        problems += request.problems
        if problems:
            raise AssemblyError(problems)
        root = library.compose(request.groups)
    composed = _finish(root, request, library)
    if composed.settings.plugins != plugin_settings(overrides):
        raise AssemblyError(["plugins.* decide what is loaded, so they can only be given as overrides, not in YAML"])
    return composed


def options(discovered: Discovered, config_dirs: Sequence[Path] = ()) -> dict[str, tuple[str, ...]]:
    """The options of every slot and of ``preset``."""
    with _hydra(discovered, [], config_dirs) as library:
        return {group: library.options(group) for group in (*SLOTS, PRESET)}


# --- reading overrides ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    key: str
    value: Any
    deletes: bool
    sweeps: bool
    packaged: bool


def _parse(overrides: Sequence[str]) -> tuple[list[_Override], list[str]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[_Override] = []
    problems: list[str] = []
    for text in overrides:
        try:
            raw = parser.parse_override(text)
            sweeps = raw.is_sweep_override()
            value = None if sweeps or raw.is_delete() else raw.value()
        except HydraException as error:
            problems.append(f"cannot read override {text!r}: {_first_line(error)}; expected key=value")
            continue
        parsed.append(_Override(text, raw.key_or_group, value, raw.is_delete(), sweeps, raw.package is not None))
    return parsed, problems


@dataclass
class _Request:
    """Overrides, sorted by what they do."""

    presets: list[str] = field(default_factory=list)
    choices: dict[str, list[str]] = field(default_factory=dict)
    assignments: list[_Override] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[str]:
        chosen = [f"{slot}={_as_option(slot, names)}" for slot, names in self.choices.items()]
        return [*([f"+{PRESET}=[{','.join(self.presets)}]"] if self.presets else []), *chosen]


def _as_option(slot: str, names: Sequence[str]) -> str:
    return f"[{','.join(names)}]" if slot in MULTI_SLOTS else names[0]


def _sort(parsed: Sequence[_Override], library: _Library) -> _Request:
    request = _Request()
    for one in parsed:
        head = one.key.partition(".")[0].partition("/")[0]
        if one.deletes:
            request.problems.append(f"{one.text}: nothing can be deleted; {_how_to_empty(head)}")
        elif one.sweeps:
            request.problems.append(f"{one.text}: a sweep; one run takes one value (a list is written [a,b])")
        elif head != PRESET and head not in ROOT_KEYS:
            request.problems.append(_unknown_root(one, head, library))
        elif one.packaged or "/" in one.key:
            request.problems.append(f"{one.text}: expected {head}=<option> or {head}.<key>=<value>")
        elif one.key == PRESET:
            request.presets += _names(one, PRESET, library, request.problems)
        elif one.key in SLOTS:
            request.choices[one.key] = _names(one, one.key, library, request.problems)
        elif head == PRESET:
            request.problems.append(f"{one.text}: presets have no keys; choose one with +preset=<name>")
        else:
            request.assignments.append(one)
    _imply_choices(request, library)
    request.choices = {slot: names for slot, names in request.choices.items() if names or slot in MULTI_SLOTS}
    return request


def _imply_choices(request: _Request, library: _Library) -> None:
    """``drafter.plugin=mine`` alone selects that option too, so that its keys exist."""
    for one in request.assignments:
        slot, _, key = one.key.partition(".")
        if key == "plugin" and slot in SLOTS and slot not in MULTI_SLOTS and slot not in request.choices:
            name = str(one.value).rpartition(":")[2]
            if name in library.options(slot):
                request.choices[slot] = [name]


def _how_to_empty(head: str) -> str:
    if head in MULTI_SLOTS:
        return f"{head}=[] selects none"
    return f"{head}=<option> selects another" if head in SLOTS else "set another value instead"


def _unknown_root(one: _Override, head: str, library: _Library) -> str:
    hint = nearest(head, (*ROOT_KEYS, PRESET))
    if not hint and isinstance(one.value, str):
        owners = [group for group in (*SLOTS, PRESET) if one.value in library.options(group)]
        hint = f"; {one.value!r} is an option of {owners[0]}" if owners else ""
    return f"{one.text}: no such key {head!r}{hint or f' (keys: {listing((PRESET, *ROOT_KEYS))})'}"


def _names(one: _Override, group: str, library: _Library, problems: list[str]) -> list[str]:
    """The option names an override gives, those that exist."""
    many = group == PRESET or group in MULTI_SLOTS
    known = library.options(group)
    given = one.value if isinstance(one.value, list) else [one.value]
    if isinstance(one.value, list) and not many:
        problems.append(f"{one.text}: {group} takes exactly one option ({listing(known)})")
        return []
    found = []
    for name in given:
        if isinstance(name, str) and name in known:
            found.append(name)
            continue
        shown = "null" if name is None else str(name)
        problems.append(
            f"{group}={shown}: no such {'preset' if group == PRESET else group + ' option'}"
            f"{nearest(shown, known)} (options: {listing(known)}){library.notes(group, shown)}"
        )
    return found


# --- Hydra ------------------------------------------------------------------------------------------------------


class _Library:
    """Hydra, initialised with our YAML, the plugins' YAML and the plugins' dataclasses."""

    def __init__(self, loader: Any, searchpath: str, discovered: Discovered, schemas: Mapping[str, Any]) -> None:
        self._loader = loader
        self._searchpath = searchpath
        self._discovered = discovered
        self._schemas = schemas
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

    def compose(self, groups: Sequence[str]) -> Any:
        import yaml
        from hydra import compose
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return compose("config", overrides=[self._searchpath, *groups])
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise AssemblyError([f"the configuration does not compose: {_first_lines(error)}"]) from error


@contextmanager
def _hydra(
    discovered: Discovered, parsed: Sequence[_Override], config_dirs: Sequence[Path]
) -> Iterator[_Library]:
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
            schemas = _store_providers(store, loader, searchpath, discovered, _picked(parsed))
            yield _Library(loader, searchpath, discovered, schemas)
    finally:
        store.repo = before_store
        GlobalHydra.instance().hydra = before_hydra


def _paths(discovered: Discovered, config_dirs: Sequence[Path]) -> list[str]:
    """Search paths after our own. Hydra ignores missing ones; we do not."""
    missing = [str(path) for path in config_dirs if not path.is_dir()]
    if missing:
        raise AssemblyError([f"--config-dir {path}: no such directory" for path in missing])
    problems = [
        f"YAML folder {path.path} of {path.origin} does not exist" for path in discovered.searchpaths if not _exists(path.path)
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


def _picked(parsed: Sequence[_Override]) -> dict[str, str]:
    """``slot.plugin=dist:name`` by slot: decides whose schema an ambiguous name has."""
    return {
        one.key.partition(".")[0]: one.value
        for one in parsed
        if one.key.endswith(".plugin") and isinstance(one.value, str) and ":" in one.value
    }


def _store_providers(
    store: Any, loader: Any, searchpath: str, discovered: Discovered, picked: Mapping[str, str]
) -> dict[str, Any]:
    """Each plugin's dataclass as option ``<slot>/<name>``, unless YAML of that name exists (Hydra would match the
    two by name, and differently in each version)."""
    stored: dict[str, Any] = {}
    for slot in SLOTS:
        in_yaml = set(loader.get_group_options(slot, overrides=[searchpath]))
        for name in discovered.names(slot):
            if name in in_yaml:
                continue
            offers = discovered.named(slot, picked[slot]) if picked.get(slot, "").endswith(f":{name}") else ()
            offer = (offers or discovered.named(slot, name))[0]
            node = {"plugin": name, **_defaults_of(offer)}
            package = f"{slot}.{name}" if slot in MULTI_SLOTS else slot
            store.store(group=slot, name=name, node=node, package=package, provider=str(offer.origin))
            stored[f"{slot}/{name}"] = offer
    return stored


def _defaults_of(offer: Offer) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = _plain(_structured(offer.config_class))
    except Exception as error:  # a third party's dataclass may hold anything; its author is named
        raise AssemblyError(
            [f"{offer.slot}={offer.name} of {offer.origin}: its config dataclass cannot be a schema: {_first_lines(error)}"]
        ) from error
    return plain


def _root_schema() -> dict[str, Any]:
    """The settings' defaults, and a place for every slot."""
    tree: dict[str, Any] = _plain(_structured(Settings))
    return tree | {slot: {} for slot in SLOTS}


# --- typing the result ------------------------------------------------------------------------------------------


def _finish(root: Any, request: _Request, library: _Library) -> Composed:
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(root, resolve=True)
    assert isinstance(tree, dict)
    problems = [f"{key}: no such key{nearest(str(key), ROOT_KEYS)} (set by YAML)" for key in tree if key not in ROOT_KEYS]
    settings = _settings(tree, request.assignments, problems)
    selections = {
        slot: _selections(slot, tree.get(slot) or {}, request, library, problems) for slot in SLOTS
    }
    if problems or settings is None:
        raise AssemblyError(problems)
    return Composed(settings, selections, tuple(request.presets))


def _settings(tree: Mapping[str, Any], assignments: Sequence[_Override], problems: list[str]) -> Settings | None:
    config = _structured(Settings)
    ours = {key: value for key, value in tree.items() if key in SETTING_KEYS}
    problems += _merge(config, ours, "")
    for one in assignments:
        if one.key.partition(".")[0] in SETTING_KEYS:
            problems += _apply(config, one.key, one, "", one.key)
    return _checked_settings(_plain(config), problems)


def _checked_settings(plain: dict[str, Any], problems: list[str]) -> Settings | None:
    """Each part on its own, so that one bad value does not hide the next."""
    parts: dict[str, Any] = {}
    default = Settings()
    for key, value in plain.items():
        part = getattr(default, key)
        if dataclasses.is_dataclass(part):
            try:
                parts[key] = values.build(type(part), value)
            except ValueError as error:
                problems.append(str(error))
        else:
            parts[key] = value
    try:
        return Settings(**parts)
    except ValueError as error:
        problems.append(str(error))
        return None


def _selections(
    slot: str, node: Any, request: _Request, library: _Library, problems: list[str]
) -> tuple[Selection, ...]:
    mine = [one for one in request.assignments if one.key.partition(".")[0] == slot]
    if slot not in MULTI_SLOTS:
        requested = request.choices.get(slot, [""])[0] or str(node.get("plugin", ""))
        return (_selection(slot, slot, requested, node, mine, library, problems),)
    for one in mine:
        instance = one.key.split(".")[1]
        if instance not in node:
            problems.append(
                f"{one.text}: {slot} {instance!r} is not selected{nearest(instance, node)} "
                f"(selected: {listing(node)}; select with {slot}=[{','.join([*node, instance])}])"
            )
    return tuple(
        _selection(
            slot,
            f"{slot}.{name}",
            name,
            part,
            [one for one in mine if one.key.startswith(f"{slot}.{name}.")],
            library,
            problems,
        )
        for name, part in node.items()
    )


def _selection(
    slot: str,
    prefix: str,
    requested: str,
    node: Mapping[str, Any],
    assignments: Sequence[_Override],
    library: _Library,
    problems: list[str],
) -> Selection:
    plain = dict(node)
    picks = [one for one in assignments if one.key == f"{prefix}.plugin"]
    plugin = str(picks[-1].value) if picks else str(plain.get("plugin") or requested)
    plain.pop("plugin", None)
    candidates = tuple(str(name) for name in plain.pop("candidates", ()) or ()) if plugin == AUTO else ()
    cls, offer = library.schema(slot, plugin)
    if offer is None and plugin != AUTO:
        return Selection(requested or plugin, plugin, plain)
    config = _structured(cls)
    problems += _merge(config, plain, prefix)
    values_set = [one for one in assignments if one not in picks]
    explicit = set(plain)
    for one in values_set:
        key = one.key.removeprefix(f"{prefix}.")
        problems += _apply(config, key, one, prefix, plugin)
        explicit.add(key.partition(".")[0])
    merged = _plain(config)
    if plugin == AUTO:
        merged = {key: value for key, value in merged.items() if key in explicit}
    _check_values(cls, merged, prefix, offer, problems)
    return Selection(requested, plugin, merged, candidates)


def _check_values(
    cls: type[Any], plain: dict[str, Any], prefix: str, offer: Offer | None, problems: list[str]
) -> None:
    unset = [key for key, value in plain.items() if value == "???"]
    if unset:
        problems.extend(f"{prefix}.{key}: must be set, for example {prefix}.{key}=<value>" for key in unset)
        return
    try:
        values.build(cls, plain)
    except ValueError as error:
        text = str(error)
        problems.append(text if text.startswith(prefix) else f"{prefix}: {text}")
    except Exception as error:  # __post_init__ of a third party may raise anything; it is named
        problems.append(f"{prefix}: config of {offer.origin if offer else cls.__name__} raised {type(error).__name__}: {error}")


def _structured(cls: type[Any]) -> Any:
    """A typed node for a dataclass. Frozen dataclasses make read-only nodes, so it is thawed."""
    from omegaconf import OmegaConf

    node = OmegaConf.structured(cls)
    _thaw(node)
    return node


def _thaw(node: Any) -> None:
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(node, None)
    for key in node:
        if OmegaConf.is_missing(node, key):
            continue
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _thaw(child)


def _plain(node: Any) -> Any:
    from omegaconf import OmegaConf

    return values.to_plain(OmegaConf.to_container(node, resolve=True))


def _merge(config: Any, plain: Mapping[str, Any], prefix: str) -> list[str]:
    """Merge values from YAML, key by key, so that each mistake is reported."""
    problems = []
    for key, value in plain.items():
        text = f"{prefix}.{key}" if prefix else key
        problems += _update(config, str(key), value, text, f"{text}={value}")
    return problems


def _apply(config: Any, key: str, one: _Override, prefix: str, owner: str) -> list[str]:
    return _update(config, key, one.value, f"{prefix}.{key}" if prefix else key, one.text.lstrip("+"))


def _update(config: Any, key: str, value: Any, full_key: str, shown: str) -> list[str]:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    unknown = _unknown_part(config, key)
    if unknown is not None:
        parent, part, keys = unknown
        where = full_key.removesuffix(key) + parent
        return [f"{shown}: no such key {part!r} in {where.rstrip('.')!r}{nearest(part, keys)} (keys: {listing(keys)})"]
    if value is not None and not isinstance(value, dict) and _is_group(config, key):
        return [f"{shown}: {full_key} is a group of keys ({listing(OmegaConf.select(config, key))}); set those"]
    try:
        OmegaConf.update(config, key, value, merge=True)
    except (ConfigAttributeError, ConfigKeyError) as error:
        return [f"{shown}: {_first_line(error)}"]
    except (OmegaConfBaseException, ValueError) as error:
        return [f"{shown}: {_first_line(error)}{_expected(config, key)}"]
    return []


def _unknown_part(config: Any, key: str) -> tuple[str, str, tuple[str, ...]] | None:
    """``(parent, part, keys of the parent)`` of the first part of a dotted key that no dataclass has."""
    from omegaconf import DictConfig, OmegaConf

    node, parent = config, ""
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return parent, part, ()
        typed = OmegaConf.get_type(node)
        if not dataclasses.is_dataclass(typed):
            return None  # a free mapping takes any key
        keys = tuple(entry.name for entry in dataclasses.fields(typed))
        if part not in keys:
            return parent, part, keys
        node, parent = node._get_node(part), f"{parent}{part}."
    return None


def _is_group(config: Any, key: str) -> bool:
    from omegaconf import OmegaConf

    return dataclasses.is_dataclass(OmegaConf.get_type(config, key))


def _expected(config: Any, key: str) -> str:
    """The type a field states, in Python's notation."""
    from omegaconf import OmegaConf

    head, _, last = key.rpartition(".")
    owner = OmegaConf.get_type(config, head) if head else OmegaConf.get_type(config)
    if not dataclasses.is_dataclass(owner):
        return ""
    kinds = {entry.name: entry.type for entry in dataclasses.fields(owner)}
    kind = kinds.get(last)
    return f"; expected {kind if isinstance(kind, str) else getattr(kind, '__name__', kind)}" if kind else ""


def failure_notes(discovered: Discovered, slot: str, name: str) -> str:
    """Plugins that failed and may be why ``slot=name`` is not on offer."""
    failed = [failure for failure in discovered.failures if failure.slot in ("", slot)]
    named = [failure for failure in failed if failure.name == name] or failed
    return "".join(f"\n      note: {failure}" for failure in named)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6]) or type(error).__name__
