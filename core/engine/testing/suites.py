"""The suite of a plugin that is known by its ``Provider`` alone: what ``engine plugins check`` runs.

``python -m engine.testing.suites FD`` reads a :class:`~engine.testing.trial.Trial` as JSON from standard input,
makes a test class of it, runs that with pytest in the current folder, and writes what happens to the file descriptor,
a line of JSON each. It writes no files but in that folder.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import pytest
import yaml

from engine.assembly import values
from engine.assembly.bind import PROTOCOLS
from engine.assembly.errors import listing, nearest
from engine.assembly.negotiation import HOST_DRAFTER
from engine.border.calls import where
from engine.contracts.provider import BuildContext
from engine.testing.context import build_context
from engine.testing.trial import Ended, Line, Outcome, Refused, Started, SuiteFound, Trial

T = TypeVar("T")
Suite = type[Any]


class CannotRun(Exception):
    """The trial asks for something that there is not; the text says what."""


class Subject:
    """A plugin that can be built as often as a suite wants it."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.device = trial.settings.get("device", trial.device.kind)

    def context(self, block_size: int = 16) -> BuildContext:
        trial = self.trial
        return build_context(block_size, device=trial.device, dtype=trial.dtype, execution=trial.execution)

    def build(self, context: BuildContext | None = None, **changes: Any) -> Any:
        """A fresh plugin. Raises whatever it raises."""
        config = values.build(values.load(self.trial.config_class), self.trial.config | changes)
        factory = values.load(self.trial.factory)
        return factory(config) if self.trial.slot == "architecture" else factory(config, context or self.context())

    @staticmethod
    def tried(ask: Callable[..., T], *args: Any) -> T | None:
        """What a plugin says of itself; ``None`` where it raises: the tests then do, and say what."""
        try:
            return ask(*args)
        except Exception:
            return None


class ContractSuite:
    """For slots that have no suite yet."""

    subject: Subject

    def test_what_is_built_fulfils_the_contract(self) -> None:
        protocol = PROTOCOLS[self.subject.trial.slot]
        built = self.subject.build()
        missing = [name for name in dir(protocol) if not name.startswith("_") and not hasattr(built, name)]
        assert not missing, f"{type(built).__name__} lacks {', '.join(missing)} of {protocol.__name__}"
        assert isinstance(built, protocol)


def suite_of(trial: Trial) -> Suite:
    """The test class: the plugin's own suite, or its slot's with everything that depends on the plugin filled in.

    Raises :class:`CannotRun`.
    """
    if trial.suite:
        return _with_settings(_own_suite(trial.suite), trial.settings)
    make = SUITES.get(trial.slot, _contract)
    return make(Subject(trial))


def _own_suite(path: str) -> Suite:
    try:
        suite = values.load(path)
    except Exception as error:  # a third party's module; the message names it
        raise CannotRun(f"the suite {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(suite, type):
        raise CannotRun(f"the suite {path} is a {type(suite).__name__}, expected a class with tests")
    return suite


def _contract(subject: Subject, note: str = "this slot has no suite: only what was built was looked at") -> Suite:
    return _filled(subject, [ContractSuite], subject=subject, _note=note)


def _architecture(subject: Subject) -> Suite:
    from engine.testing.architecture import ArchitectureConformance

    model = subject.trial.model
    if model is None:
        return _contract(subject, "no model to describe: set model.path=DIR to one that the plugin computes")
    models = {model.name: model}
    return _filled(subject, [ArchitectureConformance], make=lambda self: subject.build(), models=lambda self: models)


def _plain(module: str, name: str) -> Callable[[Subject], Suite]:
    """For suites that want a fresh plugin and nothing else."""

    def fill(subject: Subject) -> Suite:
        suite = getattr(import_module(f"engine.testing.{module}"), name)
        return _filled(subject, [suite], make=lambda self: subject.build())

    return fill


def _scheduler(subject: Subject) -> Suite:
    from engine.testing.scheduler import BLOCK, SchedulerConformance

    return _filled(subject, [SchedulerConformance], make=lambda self: subject.build(subject.context(BLOCK)))


def _kv_allocator(subject: Subject) -> Suite:
    from engine.testing import kv_allocator as suites

    def make(block_size: int) -> Any:
        return subject.build(subject.context(block_size), block_size=block_size)

    suite: Suite = suites.KVAllocatorConformance
    if subject.tried(lambda: make(suites.BLOCK).caches_prefixes):
        parts = subject.tried(lambda: suites.finds_parts(make(suites.BLOCK)))
        suite = suites.PartialBlockConformance if parts else suites.PrefixCachingConformance
    return _filled(subject, [suite], make=lambda self, block_size: make(block_size))


def _kv_format(subject: Subject) -> Suite:
    from engine.kernels.triton.device import runs_triton
    from engine.testing.kv_format import KVFormatConformance, KVTileConformance

    def has_functions() -> bool:
        made = subject.build()
        return made.load_tile() is not None and made.store_tile() is not None

    tiles = runs_triton(subject.device) and subject.tried(has_functions)
    return _filled(subject, [KVTileConformance if tiles else KVFormatConformance], make=lambda self: subject.build())


def _quantizer(subject: Subject) -> Suite:
    from engine.kernels.triton.device import runs_triton
    from engine.testing import quantizer as suites

    plain = _filled(subject, [suites.QuantizerConformance], make=lambda self: subject.build())()
    packed = {name: subject.tried(plain.pack, spec, plain.dtypes[0]) for name, spec in suites.SPECS.items()}
    layers = {name: layer for name, made in packed.items() if made for layer in made[:1]}
    adds = tuple(name for name in suites.ADDED if name in layers and layers[name].apply_add is not None)
    gates = tuple(name for name in suites.GATED if name in layers and layers[name].apply_gated is not None)
    tiles = runs_triton(plain.device) and any(layer.tile_loader is not None for layer in layers.values())
    offered = {
        suites.AddConformance: bool(adds),
        suites.GateConformance: bool(gates),
        suites.NativeConformance: any(layer.native is not None for layer in layers.values()),
        suites.TileLoaderConformance: tiles,
    }
    chosen = [suite for suite, offers in offered.items() if offers] or [suites.QuantizerConformance]
    return _filled(subject, chosen, make=lambda self: subject.build(), adds=adds, gates=gates)


def _drafter(subject: Subject) -> Suite:
    from engine.testing.drafter import DeviceDrafterConformance, HostDrafterConformance

    made = subject.tried(subject.build)
    on_host = made is not None and (made.placement == "host" or made.max_width == 0)
    if on_host or HOST_DRAFTER in subject.trial.provides:
        return _filled(subject, [HostDrafterConformance], make=lambda self: subject.build())
    return _filled(subject, [DeviceDrafterConformance], overrides=subject.trial.selected_by)


def _communicator(subject: Subject) -> Suite:
    from engine.contracts.communicator import NativeCommunicator
    from engine.testing.communicator import CommunicatorConformance, NativeConformance

    native = isinstance(subject.tried(subject.build), NativeCommunicator)
    suite = NativeConformance if native else CommunicatorConformance
    return _filled(subject, [suite], make=lambda self: subject.build())


def _attention_kernel(subject: Subject) -> Suite:
    from engine.contracts.attention_kernel import LogSumExpAttention, NativeAttention
    from engine.testing import attention_kernel as suites
    from engine.testing.attention_cases import case_named, make_context

    kernel = subject.build(make_context(case_named("verify"), "float32", subject.device))
    offered = {
        suites.CapturableConformance: kernel.capabilities.capturable,
        suites.NativeConformance: isinstance(kernel, NativeAttention),
        suites.LogSumExpConformance: isinstance(kernel, LogSumExpAttention),
    }
    chosen = [suite for suite, offers in offered.items() if offers] or [suites.AttentionKernelConformance]
    make: Callable[[Any, BuildContext], Any] = lambda self, context: subject.build(context)  # noqa: E731
    return _filled(subject, chosen, make=make, capabilities=kernel.capabilities)


SUITES: dict[str, Callable[[Subject], Suite]] = {
    "scheduler": _scheduler,
    "kv_allocator": _kv_allocator,
    "kv_format": _kv_format,
    "quantizer": _quantizer,
    "drafter": _drafter,
    "attention_kernel": _attention_kernel,
    "architecture": _architecture,
    "communicator": _communicator,
    "router": _plain("router", "RouterConformance"),
    "exporter": _plain("exporter", "ExporterConformance"),
}
"""By slot: what fills in its suite. Slots that are not here have none."""


def _filled(subject: Subject, suites: Iterable[Suite], /, **members: Any) -> Suite:
    """A test class of these suites with further members, and the attributes that the user set."""
    if any("device" in vars(base) for suite in suites for base in suite.__mro__):
        members = {"device": subject.device} | members
    made = type("TestPlugin", tuple(suites), {"__module__": __name__} | members)
    return _with_settings(made, subject.trial.settings)


def _with_settings(suite: Suite, settings: dict[str, str]) -> Suite:
    known = settable(suite)
    members = {}
    for key, text in settings.items():
        if key not in known:
            raise CannotRun(
                f"--set {key}={text}: the suite has no such attribute{nearest(key, known)} "
                f"(attributes: {listing(known)})"
            )
        members[key] = _typed(key, text, known[key])
    return type("TestPlugin", (suite,), {"__module__": __name__} | members)


def settable(suite: Suite) -> dict[str, Any]:
    """Attributes of a suite that are plain values."""
    found = {key: value for base in reversed(suite.__mro__) for key, value in vars(base).items()}
    plain = (str, int, float, tuple)
    return {key: value for key, value in found.items() if isinstance(value, plain) and not key.startswith("_")}


def _typed(key: str, text: str, now: Any) -> Any:
    """``text`` as YAML, of the type that the attribute has now."""
    kind: Any = type(now)
    if isinstance(now, tuple):
        kind = list[type(now[0])] if now else list  # type: ignore[misc]
    try:
        value = msgspec.convert(yaml.safe_load(text), kind)
        return tuple(value) if isinstance(now, tuple) else value
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0].replace("Expected", "expected")
        raise CannotRun(f"--set {key}={text}: {first} (it is {now!r})") from error


class Reporter:
    """The pytest plugin that puts the suite in the place of a file, and tells what happens."""

    def __init__(self, trial: Trial, tell: Callable[[Line], None]) -> None:
        self._trial = trial
        self._tell = tell
        self._why = ""
        self._module = ModuleType("checked")

    def pytest_sessionstart(self) -> None:
        """Suites are imported in here, so that pytest gives their assertions words."""
        pytest.register_assert_rewrite("engine.testing", self._trial.suite.partition(":")[0] or "engine.testing")
        try:
            suite = suite_of(self._trial)
        except CannotRun as refusal:
            self._tell(Refused(str(refusal)))
            pytest.exit(str(refusal))
        except Exception as error:  # of the plugin, when it was asked what it offers
            self._tell(Outcome("what it offers", "failed", why(error), traceback.format_exc()))
            pytest.exit(str(error))
        names = tuple(f"{base.__module__}.{base.__qualname__}" for base in suite.__mro__ if _has_tests(base))
        settings = {key: str(value) for key, value in settable(suite).items()}
        self._tell(SuiteFound(names, settings, getattr(suite, "_note", "")))
        self._module.TestPlugin = suite  # type: ignore[attr-defined]

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module:
        made: pytest.Module = pytest.Module.from_parent(parent, path=module_path)
        made.obj = self._module
        return made

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(Started(_test(nodeid)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        self._why = "" if call.excinfo is None else why(call.excinfo.value)

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """Before the report of a collection; behind that of a test."""
        assert call.excinfo is not None
        self._why = why(call.excinfo.value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            ok = report.outcome == "passed"
            reason = "" if ok else self._why
            details = "" if ok else report.longreprtext
            self._tell(Outcome(_test(report.nodeid), report.outcome, reason, details, report.duration))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = report.longreprtext
            self._tell(Outcome("collection", "failed", self._why, text))


def _test(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def why(error: BaseException) -> str:
    """One line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, AssertionError):
        return lines[0] or f"AssertionError{where(error.__traceback__)}"
    return f"{type(error).__name__}: {lines[0]}{where(error.__traceback__)}"


def run(trial: Trial, tell: Callable[[Line], None]) -> None:
    """Run the suite and tell what happens."""
    Path("pytest.ini").write_text("[pytest]\n")  # or pytest would look for one above the file that stands for the suite
    options = ["-q", "-c", "pytest.ini", "--rootdir=.", "--basetemp=tmp", "--noconftest", "-p", "no:cacheprovider"]
    code = pytest.ExitCode(pytest.main([*options, __file__], plugins=[Reporter(trial, tell)]))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        tell(Outcome("pytest", "failed", f"pytest ended with {code.name}"))
    tell(Ended())


def _has_tests(cls: type) -> bool:
    return cls.__name__ != "TestPlugin" and any(name.startswith("test_") for name in vars(cls))


def main(fd: int) -> None:
    os.set_inheritable(fd, False)  # or a process that the plugin starts would keep it open
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    with os.fdopen(fd, "wb", buffering=0) as out:

        def tell(line: Line) -> None:
            out.write(msgspec.json.encode(line) + b"\n")

        run(trial, tell)


if __name__ == "__main__":
    main(int(sys.argv[1]))
