"""Weights in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import UNQUANTIZED, PlainWeight, StoredTensor
from engine_plugins.quantizer.config import UnquantizedConfig


class Unquantized:
    """See :class:`engine.contracts.quantizer.Quantizer`."""

    lossless = True

    def __init__(self, config: UnquantizedConfig, context: BuildContext) -> None:
        pass

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        return UNQUANTIZED

    def format(self, spec: LinearSpec) -> None:
        return None

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PlainWeight:
        return PlainWeight(joined_weight(parts), joined_bias(parts))


def joined_weight(parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """``[sum(out), in]``; a single part is not copied, so a tied weight stays shared."""
    weights = [part["weight"] for part in parts]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def joined_bias(parts: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
    """``[sum(out)]``, zeros for parts without one; ``None`` if no part has one."""
    if not any("bias" in part for part in parts):
        return None
    return torch.cat(
        [part["bias"] if "bias" in part else part["weight"].new_zeros(part["weight"].shape[0]) for part in parts]
    )
