"""Settings all tests share."""

import os

import pytest

# Tests run tiny models: threads would only wait for each other. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = (
    "execution/triton_ops/test_interpreter.py", "quantizer/test_integer_linear.py", "laws/test_lossy_formats.py",
    "attention_kernel/test_triton_aot.py", "execution/triton_ops/test_aot.py", "quantizer/test_gpu_interpreter.py",
    "attention_kernel/test_triton_interpreter.py", "laws/test_recorded_models.py", "attention_kernel/test_cpu.py",
    "laws/test_bundled_swaps.py", "execution/triton_sampling/test_interpreter.py", "laws/test_exact_swaps.py",
)  # fmt: skip
"""Files that take a minute, longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files start first: workers take whole files, and none is to wait for another's at the end."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, name in enumerate(LONGEST) if path.endswith(name)), len(LONGEST))

    items.sort(key=place)
