"""Settings all tests share."""

import contextlib
import gc
import importlib.metadata
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

# Tests of tools, and with them, import ``tools`` from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# What is collected stays, and is much: nothing looks for garbage among it, during collection or after.
gc.disable()
# Processes that tests start find the engine's source compiled, whatever the environment says: git ignores that.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests run tiny models: threads would only wait for each other. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tracebacks are logged as Python writes them: drawn with every variable, each takes a second.
plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure([*structlog.get_config()["processors"][:-1], plain])


def _cache_of_their_own() -> tempfile.TemporaryDirectory[str]:
    """Point this process and those it starts at a cache folder that lasts as long as the tests, with the user's
    compiled kernels in it: what tests round is nothing to keep, what they compile is."""
    from engine.native.folder import user_folder

    compiled = user_folder("native")
    folder = tempfile.TemporaryDirectory(prefix="engine-tests-")
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = folder.name
    linked = user_folder("native")
    linked.parent.mkdir(mode=0o700)
    with contextlib.suppress(OSError):  # where nothing can be kept, kernels are compiled for these tests
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        linked.symlink_to(compiled, target_is_directory=True)
    return folder


def _cores_of_their_own() -> None:
    """Give this worker its share of the cores. An engine takes a thread for each core it may use: where another
    worker's threads run on the same cores, they wait for each other longer than they compute."""
    if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
        number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::count] or cores)


def _metadata_read_once() -> None:
    """Whatever composes asks what is installed, and reading that again takes longer than composing does. What a test
    installs is in a folder of its own."""
    read = importlib.metadata.PathDistribution.metadata.fget
    known: dict[str, Any] = {}

    def metadata(of: Any) -> Any:
        path = str(of._path)
        if path not in known:
            known[path] = read(of)
        return known[path]

    importlib.metadata.PathDistribution.metadata = property(metadata)


_metadata_read_once()
_cores_of_their_own()
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker is started in its parent's
    CACHE = _cache_of_their_own()
    """Removed when it is no longer referred to: at the end."""

LONGEST = (
    "drafting/test_engine.py", "tests/test_types.py", "communicator/test_shm.py", "plan/test_plan.py",
    "drafter/test_on_device.py",
    "step/test_draft_graphs.py", "laws/test_bundled_swaps.py", "attention_kernel/test_triton_aot.py",
    "triton/test_aot.py", "laws/test_exact_swaps.py", "loop/test_clients.py", "attention_kernel/test_triton.py",
    "cli/test_new_plugins.py", "assembly/test_compose.py", "cli/test_plugins.py", "laws/test_constrained.py",
    "startup/test_memory.py", "http/test_end_to_end.py", "laws/test_kv_groups.py", "ranks/test_joining.py",
    "architecture/test_dense_families.py", "ranks/test_processes.py", "tools/test_clients.py", "eval/test_main.py",
    "ranks/test_deaths.py", "communicator/test_gloo.py", "architecture/test_families_with_experts.py",
    "tools/test_gpu_check.py", "checkpoint/test_hostile.py", "tests/test_architecture_rules.py",
    "laws/test_inside_a_draft.py", "architecture/test_gemma4.py", "assembly/test_negotiation.py",
    "architecture/test_nested_families.py", "laws/test_drafted_sampling.py",
    "checkpoint/test_checkpoint_conformance.py", "attention_kernel/test_cpu.py",
)  # fmt: skip
"""Files that take longest, in that order. The first runs all short files of interpreted tests: it is the first of them
to be collected."""


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: many tests wait for processes, or for a deadline to pass."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


def pytest_configure() -> None:
    settings.register_profile("untimed", deadline=None)  # other work on a machine makes no test fail
    settings.load_profile("untimed")
    if "TRITON_INTERPRET" in os.environ:
        from tests.interpreted import quicken

        quicken()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    from tests.interpreted import module_of

    return module_of(module_path, parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files start first: workers take whole files, and none is to wait for another's at the end."""
    from tests.selection import leave_few

    leave_few(items)  # before pytest looks at marks

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, name in enumerate(LONGEST) if path.endswith(name)), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this machine cannot run: see ``needs.py``."""
    for mark in item.iter_markers("needs"):
        if reason := mark.args[0]():
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped: each reason with its number of tests."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
