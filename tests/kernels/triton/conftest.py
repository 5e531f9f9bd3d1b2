"""Where the kernels of these tests run."""

from __future__ import annotations

import pytest
import torch
import triton

torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    """The torch device that runs Triton kernels."""
    return "cpu" if triton.knobs.runtime.interpret else "cuda"
