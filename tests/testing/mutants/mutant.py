"""What a mutant is, and how a suite's tests are run on one without pytest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any, ClassVar, TypeVar

from _pytest.mark.structures import ParameterSet
from hypothesis import Phase, settings

from engine.plugin_guard.calls import PluginError

SLOTS = (
    "architecture", "communicator", "quantizer", "kv_format", "kv_allocator", "attention_kernel", "drafter",
    "scheduler", "constraint", "embedder", "kv_store", "router", "exporter",
)  # fmt: skip
"""Slots that have mutants: modules of this package."""

_SETTINGS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps the settings of a test."""
_PHASES = (Phase.explicit, Phase.generate)
_QUICK = "planted bugs"
settings.register_profile(_QUICK, phases=_PHASES, report_multiple_bugs=False)

FAILED: tuple[type[Exception], ...] = (AssertionError, PluginError)
"""A claim of a test, or the core, which says that a plugin broke its contract."""
Plugin = TypeVar("Plugin", bound=type)
Arguments = dict[str, Any]


class OnPlugin:
    """Put before a suite: the suite of ``plugin``."""

    plugin: ClassVar[Any]

    @classmethod
    def installed(cls) -> AbstractContextManager[Any]:
        """In which the plugin is found where a whole engine looks for it."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Mutant:
    """``suite`` has tests of which those in ``caught_by`` fail on ``plugin``, or raise one of ``raises``, which is what
    its bug ends in. ``missed``: why none does."""

    slot: str
    plugin: type
    suite: type[OnPlugin]
    caught_by: tuple[str, ...]
    missed: str
    raises: tuple[type[Exception], ...]

    @property
    def name(self) -> str:
        return f"{self.slot}.{self.plugin.__name__}"

    @property
    def bug(self) -> str:
        """The first line of its own docstring."""
        doc = self.plugin.__dict__.get("__doc__")
        assert doc, f"{self.name} does not say what is wrong with it"
        return str(doc).strip().splitlines()[0]

    def tests(self) -> type[OnPlugin]:
        """The suite on this plugin."""
        return suite_on(self.plugin, self.suite)


_all: list[Mutant] = []
_correct: list[type[OnPlugin]] = []


def mutant(
    suite: type[OnPlugin], *caught_by: str, missed: str = "", raises: type[Exception] | None = None
) -> Callable[[Plugin], Plugin]:
    """Declare a class a mutant, which tests of ``suite`` catch, or why none does. ``raises``: what its bug may end in,
    beside a failed assertion."""
    assert bool(caught_by) != bool(missed), "tests that catch it, or why none does"
    errors = (*FAILED, raises) if raises is not None else FAILED

    def declare(plugin: Plugin) -> Plugin:
        _all.append(Mutant(plugin.__module__.rpartition(".")[2], plugin, suite, caught_by, missed, errors))
        return plugin

    return declare


def correct(suite: type[OnPlugin], plugin: type) -> None:
    """Declare a plugin, written for mutants to derive from, to pass every test of ``suite``."""
    _correct.append(suite_on(plugin, suite))


def correct_plugins() -> list[type[OnPlugin]]:
    """Their suites."""
    all_mutants()
    return _correct


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Of all slots, in order."""
    for slot in SLOTS:
        import_module(f"{__package__}.{slot}")
    return tuple(sorted(_all, key=lambda found: SLOTS.index(found.slot)))


def suite_on(plugin: type, suite: type[OnPlugin]) -> type[OnPlugin]:
    return type(plugin.__name__, (suite,), {"plugin": plugin})


def names_of_tests(suite: type) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]


def failure(suite: type[OnPlugin], test: str, errors: tuple[type[Exception], ...] = FAILED) -> Exception | None:
    """What a test of a suite fails with first, in any of its cases: one of ``errors``. Other errors are raised: a test
    or a mutant that breaks by itself shows nothing."""
    for arguments in cases(suite, test):
        try:
            with suite.installed(), _without_shrinking(getattr(suite, test)):
                getattr(suite(), test)(**arguments)
        except errors as error:
            return error
    return None


def cases(suite: Any, test: str) -> Iterator[Arguments]:
    """The arguments that pytest would call a test with."""
    function = getattr(suite, test)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    given = [_rows(mark.args[0], mark.args[1]) for mark in marks]
    if hasattr(suite, "pytest_generate_tests"):
        asked = _Metafunc(tuple(inspect.signature(function).parameters), given)
        suite().pytest_generate_tests(asked)
    for chosen in product(*given):
        yield {name: value for arguments in chosen for name, value in arguments.items()}


class _Metafunc:
    """As much of ``pytest.Metafunc`` as suites use."""

    def __init__(self, fixturenames: Sequence[str], given: list[list[Arguments]]) -> None:
        self.fixturenames = fixturenames
        self._given = given

    def parametrize(self, names: str | Sequence[str], values: Any, ids: Any = None) -> None:
        self._given.append(_rows(names, values))


def _rows(names: str | Sequence[str], values: Any) -> list[Arguments]:
    several = not isinstance(names, str) or "," in names
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    plain = [value.values if isinstance(value, ParameterSet) else value if several else (value,) for value in values]
    return [dict(zip(wanted, row, strict=True)) for row in plain]


@contextmanager
def _without_shrinking(function: Any) -> Iterator[None]:
    """The smallest example of a known bug is worth no time."""
    before = getattr(function, _SETTINGS, None)
    profile = settings.get_current_profile_name()
    settings.load_profile(_QUICK)  # for settings that are made while the test runs
    if before is not None:
        setattr(function, _SETTINGS, settings(before, phases=_PHASES, report_multiple_bugs=False))
    try:
        yield
    finally:
        settings.load_profile(profile)
        if before is not None:
            setattr(function, _SETTINGS, before)
