"""The tests of a module are found by its name: ``core/engine/loop/pool.py`` is tested in ``tests/loop/test_pool.py``,
what is in ``plugins/`` below ``tests/plugins/`` and ``tests/lab/``.

A test in that folder or the one above may have another name, if it imports the module or has the name of its package.
What is tested somewhere else is stated here, with the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROOTS = {"core/engine": "", "plugins/engine_plugins": "plugins", "plugins/engine_lab": "lab"}
"""Folders of code, and of their tests."""
MOST = 233
"""Modules that are tested somewhere else. This number falls."""
ELSEWHERE = {
    "engine/assembly/e*": "startup/test_build.py",
    "engine/checkpoint/*": "checkpoint/test_published.py",
    "engine/cli/*": "cli/test_main.py",
    "engine/contracts/*": "testing/test_suites.py",
    "engine/contracts/ops/*": "models",
    "engine/counters/*": "plugins/exporter/test_prometheus.py",
    "engine/drafting/*": "step/test_draft_graphs.py",
    "engine/http/*": "http/test_requests.py",
    "engine/http/routes/*": "http/test_requests.py",
    "engine/kernels/*": "kernels/test_model.py",
    "engine/kernels/checks/*": "kernels/test_loading.py",
    "engine/kernels/cpu/*": "kernels/cpu/test_captured_steps.py",
    "engine/kernels/cpu/linear/*": "kernels/cpu/test_float_linear.py",
    "engine/kernels/torch/*": "kernels/test_against_transformers.py",
    "engine/kernels/triton/*": "kernels/triton/test_models.py",
    "engine/kernels/triton/quantized/*": "kernels/triton/test_quantized_linear.py",
    "engine/loop/*": "loop/test_clients.py",
    "engine/models/*": "models/test_manifest.py",
    "engine/native/*": "native/test_hostile_cache.py",
    "engine/published.py": "test_architecture_rules.py",
    "engine/ranks/*": "ranks/test_starting.py",
    "engine/sampling/*": "sampling/triton/test_kernels.py",
    "engine/service/*": "http",
    "engine/startup/*": "startup/test_build.py",
    "engine/startup/checks/*": "plugin_guard/test_misbehaving.py",
    "engine/testing/*": "plugins",
    "engine/version.py": "plugins/test_metadata.py",
    "engine_lab/*/*": "lab",
    "engine_lab/*/*/*": "lab",
    "engine_plugins/architecture/*": "plugins/architecture/test_nested_families.py",
    "engine_plugins/attention_kernel/*": "plugins/attention_kernel/test_cpu.py",
    "engine_plugins/communicator/*": "plugins/communicator/test_gloo.py",
    "engine_plugins/devices.py": "plugins/attention_kernel/test_cpu.py",
    "engine_plugins/drafter/*": "plugins/drafter/test_on_device.py",
    "engine_plugins/exporter/*": "plugins/exporter/test_prometheus.py",
    "engine_plugins/kv_allocator/*": "testing/test_kv_allocator_suite.py",
    "engine_plugins/kv_format/*": "plugins/kv_format/test_8_bit_formats.py",
    "engine_plugins/parallelism/*": "ranks/test_joining.py",
    "engine_plugins/quantizer/*": "plugins/quantizer/test_quantizer_conformance.py",
    "engine_plugins/quantizer/checkpoint/*": "plugins/quantizer/checkpoint/test_configurations.py",
    "engine_plugins/quantizer/checkpoint/*/*": "plugins/quantizer/checkpoint/test_written_by_libraries.py",
    "engine_plugins/scheduler/*": "plugins/scheduler/test_fairness.py",
}
"""By the path of modules, where their tests are; the last one that matches, in as many folders as the pattern has."""


def modules() -> Iterator[tuple[str, Path]]:
    """Path of each module from its root of sources, and the test file that would have its name."""
    for root, place in ROOTS.items():
        folder = TESTS.parent / root
        for file in sorted(folder.rglob("*.py")):
            inside = file.relative_to(folder)
            if file.name != "__init__.py" and "templates" not in inside.parts:
                yield f"{folder.name}/{inside.as_posix()}", TESTS / place / inside.parent / f"test_{inside.name}"


@cache
def texts(folder: Path) -> str:
    """All tests of a folder, without those below it."""
    return "\n".join([file.read_text() for file in sorted(folder.glob("test_*.py"))])


def is_found(module: str, test: Path) -> bool:
    package = test.parent.with_name(f"test_{test.parent.name}.py")
    if test.exists() or package.exists():
        return True
    dotted = re.escape(module.removesuffix(".py").replace("/", "."))
    return any(re.search(rf"\b{dotted}\b", texts(folder)) for folder in (test.parent, test.parent.parent))


def pattern_of(module: str) -> str | None:
    found = [p for p in ELSEWHERE if fnmatch(module, p) and p.count("/") == module.count("/")]
    return found[-1] if found else None


@cache
def left() -> list[str]:
    """Modules whose tests are not found by their name."""
    return [module for module, test in modules() if not is_found(module, test)]


def test_the_tests_of_a_module_are_found_by_its_name_or_their_place_is_stated() -> None:
    assert [module for module in left() if pattern_of(module) is None] == []
    assert [place for place in ELSEWHERE.values() if not (TESTS / place).exists()] == []


def test_nothing_is_stated_in_vain_and_less_is_every_time() -> None:
    assert {pattern_of(module) for module in left()} == set(ELSEWHERE)
    assert len(left()) == MOST, "more: write a test of that name; fewer: lower MOST"
