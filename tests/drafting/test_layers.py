"""Layers that drafters run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.drafting.layers import Layers


def test_layers_that_read_more_than_the_residual_stream_are_not_run_on_it_alone() -> None:
    nothing: Any = None
    layers = Layers((1, 2), [], 1, nothing, nothing, nothing)
    with pytest.raises(ValueError, match=r"1 values enter layers that read 2: enter\(\) has them all"):
        layers.run(torch.zeros(1, 8), metadata=nothing)
