"""A quantizer's weights as kernels read them: made now, or as they were kept on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import KeepingQuantizer, Quantizer, WeightFormat
from engine.kernels.checks.linear import LinearCheck, checked_weight
from engine.kernels.kept_weights import KeptWeights
from engine.kernels.linear import PackedLinear
from engine.kernels.packing import Target, pack_weight
from engine.plugin_guard.calls import contract_error, quote


class Packer:
    """Of one load."""

    def __init__(self, quantizer: Quantizer, target: Target) -> None:
        self._quantizer = quantizer
        self._target = target
        self._check = LinearCheck(quantizer, target)
        self._kept = KeptWeights(quantizer.keeping, target) if isinstance(quantizer, KeepingQuantizer) else None

    def __call__(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]]) -> PackedLinear:
        """``parts``: this rank's tensors."""
        form = format_of(self._quantizer, spec)
        place = None if self._kept is None or form is None else self._kept.place(spec, form, parts)
        packed = None
        if place is not None and self._kept is not None and form is not None:
            packed = self._kept.read(place, spec, form)
        if packed is None:
            weight = self._quantizer.pack(spec, parts, self._target.dtype, self._target.device)
            weight = checked_weight(self._quantizer, spec, weight)
            packed = pack_weight(spec, weight, self._target)
            if place is not None and self._kept is not None and self._kept.write(place, spec, weight, packed):
                packed = replace(packed, label=f"{packed.label}, rounded now and kept on disk")
        self._check(spec, parts, packed)
        return packed


def format_of(quantizer: Quantizer, spec: LinearSpec) -> WeightFormat | None:
    """What a quantizer says it makes of a layer."""
    found = quantizer.format(spec)
    if found is not None and not isinstance(found, WeightFormat):
        raise contract_error(quantizer, "format", f"returned {quote(found)}, expected a WeightFormat or None")
    return found
