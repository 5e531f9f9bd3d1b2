"""The suite of a plugin that is known by its ``Provider`` alone: what ``engine plugins check`` runs.

``python -m engine.testing.suites FD`` reads a :class:`~engine.testing.trial.Trial` as JSON from standard input,
makes a test class of it, runs that with pytest in the current folder, and writes what happens to the file descriptor,
a line of JSON each. It writes no files but in that folder.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from engine.assembly import values
from engine.contracts.slots import SLOTS
from engine.plugin_guard.calls import changed, error_line, where
from engine.testing.subject import CannotRun, Subject, Suite, contract_suite, settable, with_settings
from engine.testing.trial import Ended, Line, Outcome, Refused, Started, SuiteFound, Trial


def suite_of(trial: Trial) -> Suite:
    """The test class: the plugin's own suite, or its slot's with everything that depends on the plugin filled in.

    Raises :class:`CannotRun`.
    """
    if trial.suite:
        return with_settings(_own_suite(trial.suite), trial.settings)
    path, subject = SLOTS[trial.slot].suite, Subject(trial)
    made: Suite = values.load(path)(subject) if path else contract_suite(subject)
    return made


def _own_suite(path: str) -> Suite:
    try:
        suite = values.load(path)
    except Exception as error:  # a third party's module; the message names it
        raise CannotRun(f"the suite {path} cannot be imported: {error_line(error)}") from error
    if not isinstance(suite, type):
        raise CannotRun(f"the suite {path} is a {type(suite).__name__}, expected a class with tests")
    return suite


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
        """Before the report of a collection; after that of a test."""
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
    return f"{type(error).__name__}: {lines[0]}{changed(error)}{where(error.__traceback__)}"


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
