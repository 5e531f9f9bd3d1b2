"""Runs tests of Triton kernels through Triton's interpreter. It replaces functions while triton is imported, and other
tests of a run may have imported it already; so it gets a process of its own. (That of Triton 3.6 needs numpy < 2.4.)

A file of ``KERNEL_TESTS`` is one test of a run here, which runs the file in such a process; short ones share one. With
``TRITON_INTERPRET=1`` or a CUDA device its tests are collected one by one, like those of any other file.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.triton.device import runs_triton

TESTS = Path(__file__).parent
ON_CPU = (
    "drafting/test_engine.py", "kernels/triton/test_models.py", "kernels/triton/test_ranks.py",
    "laws/test_captured_models.py", "laws/test_early_reads.py", "plugins/communicator/test_nccl.py",
)  # fmt: skip
"""Tests of kernels whose tensors are on the CPU: interpreted beside a CUDA device, too."""
KERNEL_TESTS = (
    *ON_CPU,
    *(
        f"kernels/triton/test_{name}.py"
        for name in ("chain_inputs", "fragments", "heads", "joined_norms", "linear", "lowering")
    ),
    *(f"kernels/triton/test_{name}.py" for name in ("mixture", "narrow_types", "rotation", "routing", "rowwise")),
    *(f"kernels/triton/test_{name}.py" for name in ("step_outputs", "sums")),
    "sampling/triton/test_kernels.py",
    "plugins/attention_kernel/test_triton.py",
    *(f"plugins/kv_format/test_{name}.py" for name in ("8_bit_formats", "documented_example")),
    *(f"kernels/triton/test_quantized_{name}.py" for name in ("linear", "loaders")),
    "plugins/quantizer/test_gpu_experts.py",
)
"""Files whose tests run Triton kernels, below ``tests/``."""
SHORT = (
    "drafting/test_engine.py",
    "kernels/triton/test_models.py",
    "laws/test_captured_models.py",
    "laws/test_early_reads.py",
    *(
        f"kernels/triton/test_{name}.py"
        for name in ("chain_inputs", "fragments", "heads", "joined_norms", "linear", "lowering")
    ),
    *(f"kernels/triton/test_{name}.py" for name in ("mixture", "narrow_types", "ranks", "routing", "rowwise")),
    *(f"kernels/triton/test_{name}.py" for name in ("step_outputs", "sums")),
    *(f"kernels/triton/test_quantized_{name}.py" for name in ("linear", "loaders")),
    *(f"plugins/kv_format/test_{name}.py" for name in ("8_bit_formats", "documented_example")),
    "plugins/communicator/test_nccl.py",
    "plugins/quantizer/test_gpu_experts.py",
    "sampling/triton/test_kernels.py",
)
"""All but the longest: their process takes seconds to start, and one runs them all, at the place of the first."""
BESIDE = (
    "step/test_tables.py::test_each_group_has_slots_and_block_tables_of_its_own",
    "step/test_tables.py::test_captured_steps_of_ranks_that_share_out_tokens_are_filled_as_others_are",
)
"""Tests of other files that the process of the short ones runs, too; see ``step/test_graphs_on_triton.py``."""
GATHERED = pytest.StashKey[list[Path]]()
"""The short ones of a run."""

starts_interpreter = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="the tests it starts run in this very process"
)
"""For tests that call :func:`run_interpreted`."""


def run_interpreted(*files: Path, select: str = "", marked: str = "not slow") -> int:
    """Run the tests of ``files`` under the interpreter: those that ``select`` (as for ``-k``) and ``marked`` (as for
    ``-m``) name.

    Returns how many passed. Asserts that none failed or was skipped, and that there were some: with ``slow`` alone
    there may be none.
    """
    chosen = ["-m", marked, *(["-k", select] if select else [])]
    command = [sys.executable, "-m", "pytest", "-n0", "-x", *map(str, files), *chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=600)
    if marked == "slow" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


def quicken() -> None:
    """Spare the interpreter most of its work. At every call of a device function it searches all of triton.language for
    what it replaces, and replaces it again: the search is made once, and the replacement once a launch. It computes for
    every sum and product of integers whether it overflows, and looks at that in debug mode alone. For every tensor it
    makes a table of types, and a shape anew."""
    from triton.language import core
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    stored_as = cache(interpreter._get_np_dtype)

    def stored_as_its_scalar(of: Any) -> Any:
        return stored_as(core.uint64 if of.scalar.is_ptr() else of.scalar)

    interpreter._get_np_dtype = stored_as_its_scalar
    make = core.tensor.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_tensor(tensor: Any, handle: Any, type: Any) -> None:
        """As ``tensor.__init__``, with the shape and number of elements of the tensor before of that shape."""
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make(tensor, handle, type)
            shapes[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shapes[key]

    core.tensor.__init__ = make_tensor
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    make_type = core.block_type.__init__

    def make_block_type(type: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in types:
            make_type(type, element_ty, shape)
            types[key] = {name: kept for name, kept in vars(type).items() if name != "element_ty"}
        vars(type).update(types[key], element_ty=element_ty)

    core.block_type.__init__ = make_block_type

    @cache
    def builtins_of(holder: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(holder) if is_builtin(member)]

    def replace_in(holder: Any, *how: Any) -> None:
        for name, member in builtins_of(holder):
            if getattr(holder, name) is member:  # or it is replaced already
                interpreter._patch_attr(holder, name, member, *how)

    assert callable(interpreter._patch_builtin)
    interpreter._patch_builtin = replace_in
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def patch_once(function: Any) -> Any:
        """For the module of a function; a launch puts back what was replaced for it."""
        module = id(function.__globals__)
        if module in patched:
            return None  # who calls a device function does not ask
        patched.add(module)
        return patch(function)

    def launched(*arguments: Any, **named: Any) -> None:
        patched.clear()
        try:
            launch(*arguments, **named)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launched


def module_of(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """How pytest is to collect a file: as one interpreted test, or (``None``) as usual."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    runs_here = runs_triton("cpu" if name in ON_CPU or not torch.cuda.is_available() else "cuda")
    if runs_here or name not in KERNEL_TESTS:
        return None
    files = parent.session.stash.setdefault(GATHERED, []) if name in SHORT else []
    return _InterpretedFile.from_parent(parent, path=path, files=files)


class _InterpretedFile(pytest.File):
    def __init__(self, *, files: list[Path], **known: object) -> None:
        super().__init__(**known)
        self.files = files

    def collect(self) -> Iterator[pytest.Item]:
        self.files.append(self.path)
        if len(self.files) == 1:
            if self.path.relative_to(TESTS).as_posix() in SHORT:
                self.files += [TESTS / name for name in BESIDE]
            yield _Interpreted.from_parent(self, name="interpreted", files=self.files, marked="not slow")
        if re.search(r"mark\.slow|parametrize|Conformance", self.path.read_text()):
            slow = _Interpreted.from_parent(self, name="interpreted slow", files=[self.path], marked="slow")
            slow.add_marker("slow")
            yield slow


class _Interpreted(pytest.Item):
    def __init__(self, *, files: list[Path], marked: str, **known: object) -> None:
        super().__init__(**known)
        self.files = files
        self.marked = marked

    def runtest(self) -> None:
        run_interpreted(*self.files, marked=self.marked)
