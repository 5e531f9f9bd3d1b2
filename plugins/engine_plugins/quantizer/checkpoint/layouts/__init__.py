"""The tensors of a stored layer, and how to read them: one file for each layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec, Range
from engine.contracts.quantizer import QuantizedWeight
from engine_plugins.quantizer.checkpoint.layouts import awq, gptq, mxfp4, packed, plain
from engine_plugins.quantizer.checkpoint.layouts.rule import TensorRule
from engine_plugins.quantizer.checkpoint.scheme import Scheme


class Layout(Protocol):
    """What a file here has."""

    def rules(self, scheme: Scheme, part: LinearPart, spec: LinearSpec) -> Sequence[TensorRule]:
        """The tensors that ``part`` has, with the shapes and dtypes they must have."""
        ...

    def read(
        self,
        scheme: Scheme,
        name: str,
        tensors: Mapping[str, Tensor],
        in_features: int,
        rows: Sequence[Range] | None = None,
    ) -> QuantizedWeight:
        """``tensors``: by suffix, perhaps a cut of them. ``in_features``: of the whole layer; ``rows``: which of its
        output features are here, in order, ``None``: all. Raises
        :class:`engine.checkpoint.tensors.CheckpointError` naming the tensor whose values cannot be."""
        ...


LAYOUTS: Mapping[str, Layout] = {"plain": plain, "packed": packed, "awq": awq, "gptq": gptq, "mxfp4": mxfp4}
