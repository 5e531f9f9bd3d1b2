"""Packed weights on disk, from one start to the next: under what they are kept, and in what form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.checkpoint.parts import origin_of
from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import Keeping, QuantizedWeight, Weight, WeightFormat
from engine.kernels import quantized
from engine.kernels.cpu.linear import integer_linear
from engine.kernels.disk_cache import DiskCache, Kept, digest
from engine.kernels.linear import PackedLinear
from engine.kernels.packing import Target, pack_weight
from engine.kernels.quantized import paired, unpaired
from engine.native.folder import user_folder

SMALLEST = 1 << 19
"""Weights of a layer from which on it is kept: fewer are rounded as fast as a file is opened and read."""


@dataclass(frozen=True, slots=True)
class Place:
    """``name`` says which layer it is and in what form, ``key`` also what it was made of."""

    name: str
    key: str


class KeptWeights:
    """A quantizer's weights of one model on disk. Nothing is touched there before the first layer is asked for."""

    def __init__(self, keeping: Keeping, target: Target) -> None:
        self._keeping, self._target = keeping, target
        self._opened: DiskCache | None = None

    def place(self, spec: LinearSpec, form: WeightFormat, parts: Sequence[Mapping[str, Tensor]]) -> Place | None:
        """``None``: this layer is not kept."""
        if self._keeping.cache == "none" or spec.out_features * spec.in_features < SMALLEST:
            return None
        origin = origin_of(parts)
        if origin is None:
            return None
        form = replace(form, input_quant=None)  # of inputs: weights are the same
        what = json.dumps([spec.kind, [part.out_features for part in spec.parts], spec.in_features, astuple(form)])
        name = f"{spec.parts[0].name}\n{what}\n{origin.place}"
        made_of = "\n".join((self._maker, name, origin.state))
        return Place(name, hashlib.sha256(made_of.encode()).hexdigest())

    def read(self, place: Place, spec: LinearSpec, form: WeightFormat) -> PackedLinear | None:
        """``form``: of the layer, whose inputs may be rounded otherwise than when it was kept."""
        kept = self._cache.read(place.name, place.key)
        if kept is None:
            return None
        packed = pack_kept(spec, kept, form.input_quant, self._target)
        return replace(packed, label=f"{packed.label}, read as kept on disk")

    def write(self, place: Place, spec: LinearSpec, weight: Weight, packed: PackedLinear) -> bool:
        """Whether it is there for the next start. ``packed``: what became of ``weight``."""
        kept = to_keep(spec, weight, packed, self._target)
        return kept is not None and self._cache.write(place.name, place.key, kept)

    @property
    def _maker(self) -> str:
        """What turns weights as they are stored into weights as they are kept."""
        in_panels = "panels" if self._target.in_integer_panels else "codes"
        return f"{_code()} {torch.__version__} {in_panels} {self._keeping.maker}"

    @property
    def _cache(self) -> DiskCache:
        if self._opened is None:
            keeping = self._keeping
            root = user_folder("weights") if keeping.cache == "auto" else Path(keeping.cache)
            self._opened = DiskCache(root, f"{keeping.name}-{digest(self._maker)}", keeping.limit)
        return self._opened


def to_keep(spec: LinearSpec, weight: Weight, packed: PackedLinear, target: Target) -> Kept | None:
    """What :func:`pack_kept` makes the same of: ``packed`` as it is where it lies in panels, else ``weight``; ``None``:
    a weight of which nothing is kept.

    ``packed``: what :func:`pack_weight` made of ``weight``.
    """
    if not isinstance(weight, QuantizedWeight) or weight.zero is not None or weight.order is not None or weight.e2m1:
        return None
    sizes = {
        "out_features": weight.out_features,
        "in_features": weight.in_features,
        "group": weight.group_size,
        "bits": weight.bits,
        "floating": int(weight.floating),
    }
    if target.in_integer_panels and integer_linear.can_pack(weight):
        return Kept(packed.tensors, sizes | {"panels": 1, "gated": int(spec.kind == "gate_up")})
    tensors = {"codes": paired(weight.codes) if weight.bits == 4 else weight.codes, "scale": weight.scale}
    return Kept(tensors if weight.bias is None else tensors | {"bias": weight.bias}, sizes | {"panels": 0})


def pack_kept(spec: LinearSpec, kept: Kept, input_quant: Literal["int8", "fp8"] | None, target: Target) -> PackedLinear:
    """As :func:`pack_weight`, of what :func:`to_keep` made for a device like this one."""
    sizes, tensors = dict(kept.sizes), dict(kept.tensors)
    out_features, in_features, group, bits = (sizes[n] for n in ("out_features", "in_features", "group", "bits"))
    floating = bool(sizes["floating"])
    if sizes["panels"]:
        gated = bool(sizes["gated"])
        panels = integer_linear.Panels(out_features, in_features, group, bits, floating, gated, **tensors)
        return integer_linear.pack_panels(panels, input_quant or "bf16")
    codes = unpaired(tensors["codes"], in_features) if bits == 4 else tensors["codes"]
    weight = QuantizedWeight(codes, tensors["scale"], group, bits, bias=tensors.get("bias"), input_quant=input_quant)
    return pack_weight(spec, weight, target)


@cache
def _code() -> str:
    """Of the code that lays out: a number that is to be raised with every change would be forgotten."""
    sources = [*sorted(Path(integer_linear.__file__).parent.glob("*.py")), Path(quantized.__file__), Path(__file__)]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
