"""Where Triton cannot run, the plugin says so when it is built, with the way out."""

from __future__ import annotations

import pytest

from engine.contracts.config import SlotConfig
from engine.testing.attention_cases import SMALL_CASES, make_context
from engine_plugins.attention_kernel.triton.kernel import TritonAttention


def test_a_cpu_is_refused_when_the_plugin_is_built() -> None:
    context = make_context(SMALL_CASES[0], "float32", "cpu")
    with pytest.raises(RuntimeError, match=r"device=cpu: expected a CUDA device .*attention_kernel=torch"):
        TritonAttention(SlotConfig(), context)
