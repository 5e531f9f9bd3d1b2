"""Where the kernels of these tests run."""

from __future__ import annotations

import pytest
import torch
import triton

torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    """A torch device that runs Triton kernels; skips where there is none."""
    if triton.knobs.runtime.interpret:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("runs in test_interpreter.py, or here with TRITON_INTERPRET=1 or a CUDA device")
