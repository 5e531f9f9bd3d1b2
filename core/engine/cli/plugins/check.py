"""``engine plugins check``: does an installed plugin keep what its slot's contract promises?"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from engine.assembly import values
from engine.assembly.assemble import Configured, configure
from engine.assembly.compose import AUTO
from engine.assembly.device_facts import device_facts
from engine.assembly.discovery import Offer, discover
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.cli.plugins.named import HELP, find_offer, selecting, shown
from engine.contracts.command import FAILED, OK, Command
from engine.contracts.model import DeviceFacts, ModelConfig
from engine.testing.trial import Ended, Line, Outcome, Refused, Started, SuiteFound, Trial

RUNNER = "engine.testing.suites"
NEEDED = ("pytest", "hypothesis")
SHOWN = 2000
"""Characters that are shown of what a process wrote before it died."""


@dataclass(slots=True)
class Report:
    """What a run of a suite came to."""

    found: SuiteFound = field(default_factory=lambda: SuiteFound((), {}))
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.outcome == "failed"]

    @property
    def passed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.outcome == "passed"]

    @property
    def ok(self) -> bool:
        return bool(self.passed) and not self.failed


def trial_of(offer: Offer, overrides: Sequence[str], settings: Sequence[str], config_dirs: Sequence[Path]) -> Trial:
    """What the process is asked. Raises :class:`AssemblyError` for a configuration or a setting that is none."""
    selected_by = [*selecting(offer, discover()), *overrides]
    configured = configure(selected_by, config_dirs)
    asked, device = configured.composed.settings, _device(configured)
    return Trial(
        slot=offer.slot,
        name=offer.name,
        factory=offer.provider.factory,
        config_class=values.class_path(offer.config_class),
        config=_config(configured, offer),
        provides=offer.provider.provides,
        device=device,
        suite=offer.provider.suite,
        settings=dict(_setting(text) for text in settings),
        selected_by=tuple(selected_by),
        dtype="float32" if asked.model.dtype == AUTO else asked.model.dtype,
        execution="eager" if asked.execution == AUTO else asked.execution,
        model=_model(configured, offer, device) if offer.slot == "architecture" else None,
    )


def _model(configured: Configured, offer: Offer, device: DeviceFacts) -> ModelConfig | None:
    """``model.path``, if the plugin computes it."""
    try:
        model = model_config(configured.composed.settings.model.path)
        unsupported: Any = offer.provider.unsupported
        return None if unsupported(model, device) else model
    except Exception:  # a path without a model, or a plugin that cannot say: its contract is looked at without one
        return None


def _device(configured: Configured) -> DeviceFacts:
    """The one that is asked for; else a GPU, if there is one and the plugin serves on it."""
    asked = configured.composed.settings
    found = device_facts(asked.device)
    if asked.device != AUTO or found.kind == "cpu":
        return found
    try:
        resolve(configured.composed, configured.discovered, model_config(asked.model.path), found)
    except AssemblyError:
        return device_facts("cpu")
    return found


def _config(configured: Configured, offer: Offer) -> dict[str, Any]:
    picks = configured.composed.selections[offer.slot]
    return next(dict(pick.config) for pick in picks if pick.plugin in (offer.name, offer.qualified))


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise AssemblyError([f"--set {text}: expected an attribute of the suite and its value, as in error=0.01"])
    return key, value


def run_suite(trial: Trial) -> Report:
    """Run the suite in a process of its own, in a folder that is gone afterwards. Raises :class:`AssemblyError`."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise AssemblyError([f"plugins check needs {' and '.join(missing)}; install with: pip install 'engine[test]'"])
    with TemporaryDirectory(prefix="engine-check-") as folder:
        report, running, died = Report(), "", True
        with _Child(trial, Path(folder)) as child:
            for line in child.lines():
                match line:
                    case Refused(problem):
                        raise AssemblyError([problem])
                    case SuiteFound():
                        report.found = line
                    case Started(test):
                        running = test
                    case Outcome():
                        report.outcomes.append(line)
                    case Ended():
                        died = False
            if died:
                report.outcomes.append(Outcome(running or "start", "failed", *child.how_it_ended()))
    return report


class _Child:
    """The process that runs the suite."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self._stderr = folder / "stderr"
        reading, writing = os.pipe()
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", RUNNER, str(writing)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(writing,),
            )
        os.close(writing)
        self._out = os.fdopen(reading, "rb")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already: :meth:`how_it_ended` says how
            self._process.stdin.write(msgspec.json.encode(trial))
            self._process.stdin.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()
        if error[0] is not None:
            self._process.kill()
        self._process.wait()

    def lines(self) -> Iterator[Line]:
        decode = msgspec.json.Decoder(Line).decode
        for line in self._out:
            yield decode(line)

    def how_it_ended(self) -> tuple[str, str]:
        """In a line, and what it wrote last: Python's own account of a crash, if there is one."""
        code = self._process.wait()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        wrote = self._stderr.read_text("utf-8", "replace")
        where = re.search(r'most recent call first\):\n  File "(.+)", line (\d+)', wrote)
        at = f" ({Path(where[1]).name}:{where[2]})" if where else ""
        account = wrote[wrote.find("Fatal Python error") :][:SHOWN] if where else wrote[-SHOWN:]
        return f"the process {how}{at}; tests after this one did not run", account


def as_json(offer: Offer, report: Report) -> str:
    return json.dumps(
        {
            "plugin": shown(offer),
            "origin": str(offer.origin),
            "suites": list(report.found.suites),
            "passed": len(report.passed),
            "failed": len(report.failed),
            "note": report.found.note,
            "tests": [msgspec.to_builtins(one) for one in report.outcomes],
        },
        indent=2,
    )


def _print(offer: Offer, report: Report, details: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("test", "", "why"):
        table.add_column(column, overflow="fold")
    for row in _rows(report.outcomes):
        table.add_row(*row)
    console = Console(width=shutil.get_terminal_size((120, 24)).columns, highlight=False, markup=False)
    console.print(table)
    for one in report.failed if details else ():
        print(f"---- {one.test}\n{one.details}\n")
    print(f"{shown(offer)} of {offer.origin}: {len(report.passed)} passed, {len(report.failed)} failed")
    if report.found.note:
        print(f"note: {report.found.note}")
    if report.failed:
        known = ", ".join(f"{key}={value}" for key, value in report.found.settings.items())
        if known:
            print(f"the suite can be told, with --set: {known}")
        if not details:
            print("--details shows all that is known of each failure")


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, str]]:
    """One for each test; the cases of a test share one, but for those that did not pass."""
    tests: dict[str, list[Outcome]] = {}
    for one in outcomes:
        tests.setdefault(one.test.partition("[")[0], []).append(one)
    for name, cases in tests.items():
        passed = [one for one in cases if one.outcome == "passed"]
        if passed:
            yield name + (f" ({len(passed)} cases)" if len(passed) > 1 else ""), "passed", ""
        yield from ((one.test, one.outcome, one.why) for one in cases if one.outcome != "passed")


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="PLUGIN", help=HELP)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what the suite cannot know: an attribute of it, as in --set weight_error=0.1 (may be repeated)",
    )
    parser.add_argument("--details", action="store_true", help="print all that is known of each failure")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    offer = find_offer(flags.name, discover())
    report = run_suite(trial_of(offer, overrides, flags.set, flags.config_dir))
    if flags.json:
        print(as_json(offer, report))
    else:
        _print(offer, report, flags.details)
    return OK if report.ok else FAILED


COMMAND = Command(
    "Run the conformance suite of its slot on an installed plugin; exit code 1 where a test fails.",
    _run,
    _flags,
    notes="Overrides configure the plugin as for 'engine serve'; execution= and model.dtype= are what it is built for.",
)
