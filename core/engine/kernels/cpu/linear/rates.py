"""How fast linear layers are on this machine, measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.kernels.linear import PackedLinear

ROUNDS = 15
SHORTEST_S = 1e-3
"""A product is repeated until it takes so long."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch and the kernels compute with so many, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest_rates(layers: Mapping[str, PackedLinear], x: Tensor, rounds: int = ROUNDS) -> dict[str, float]:
    """Each layer's best rate in GFLOP/s on ``x [rows, in]``. Layers take turns, so that a machine whose speed drifts
    is fair to all; the best is what other processes disturbed least."""
    repeats = {name: max(1, round(SHORTEST_S / _seconds(layer, x, 1))) for name, layer in layers.items()}
    best = dict.fromkeys(layers, float("inf"))
    for _ in range(rounds):
        for name, layer in layers.items():
            best[name] = min(best[name], _seconds(layer, x, repeats[name]))
    rows, inputs = x.shape
    return {name: 2 * rows * inputs * layers[name].out_features / seconds / 1e9 for name, seconds in best.items()}


def _seconds(layer: PackedLinear, x: Tensor, repeats: int) -> float:
    layer.apply(x)
    started = time.perf_counter()
    for _ in range(repeats):
        layer.apply(x)
    return (time.perf_counter() - started) / repeats
