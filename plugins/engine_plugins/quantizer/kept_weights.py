"""What rounded weights are kept under on disk: everything that they follow from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.checkpoint.parts import origin_of
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear, QuantizedWeight
from engine.kernels import quantized
from engine.kernels.cpu.linear import integer_linear
from engine.kernels.packing import Target, pack_quantized
from engine.kernels.quantized import Format, paired, unpaired
from engine.kernels.triton.device import runs_triton
from engine.native.folder import user_folder
from engine_plugins.quantizer.config import OnLoadConfig
from engine_plugins.quantizer.disk_cache import GIB, DiskCache, Kept, digest

SMALLEST = 1 << 19
"""Weights of a layer from which on it is kept: fewer are rounded as fast as a file is opened and read."""


@dataclass(frozen=True, slots=True)
class Place:
    """``name`` says which layer it is and in what form, ``key`` also what it was made of."""

    name: str
    key: str


class KeptWeights:
    """Rounded weights of one model on disk. Nothing is touched there before the first layer is asked for."""

    def __init__(self, config: OnLoadConfig, context: BuildContext) -> None:
        self._config, self._context = config, context
        self._opened: DiskCache | None = None

    def place(self, spec: LinearSpec, form: Format, parts: Sequence[Mapping[str, Tensor]]) -> Place | None:
        """``None``: this layer is not kept."""
        if self._config.cache == "none" or spec.out_features * spec.in_features < SMALLEST:
            return None
        origin = origin_of(parts)
        if origin is None:
            return None
        what = json.dumps([spec.kind, [part.out_features for part in spec.parts], spec.in_features, astuple(form)])
        name = f"{spec.parts[0].name}\n{what}\n{origin.place}"
        made_of = "\n".join((self._maker, name, origin.state))
        return Place(name, hashlib.sha256(made_of.encode()).hexdigest())

    def read(self, place: Place) -> Kept | None:
        return self._cache.read(place.name, place.key)

    def write(self, place: Place, kept: Kept) -> bool:
        """Whether it is there for the next start."""
        return self._cache.write(place.name, place.key, kept)

    @property
    def _maker(self) -> str:
        """What turns weights as they are stored into weights as they are kept."""
        in_panels = integer_linear.wanted(self._context)
        return f"{_code()} {torch.__version__} {'panels' if in_panels else 'codes'}"

    @property
    def _cache(self) -> DiskCache:
        if self._opened is None:
            root = user_folder("weights") if self._config.cache == "auto" else Path(self._config.cache)
            model, kind = self._context.model, type(self._config).__name__.removesuffix("Config").lower()
            readable = re.sub(r"[^\w.-]", "_", model.name)[-60:].lstrip(".")
            folder = f"{readable}-{kind}-{digest(f'{model.path} {kind} {self._maker}')}"
            self._opened = DiskCache(root, folder, int(self._config.cache_gib * GIB))
        return self._opened


def to_keep(spec: LinearSpec, weight: QuantizedWeight, packed: PackedLinear, target: Target) -> Kept:
    """What :func:`pack_kept` makes the same of: ``packed`` as it is where it lies in panels, else ``weight``.

    ``packed``: what :func:`pack_quantized` made of ``weight``, which has neither zeros nor an order.
    """
    sizes = {
        "out_features": weight.out_features,
        "in_features": weight.in_features,
        "group": weight.group_size,
        "bits": weight.bits,
        "floating": int(weight.floating),
    }
    if not runs_triton(target.device) and target.in_panels and integer_linear.can_pack(weight):
        return Kept(packed.tensors, sizes | {"panels": 1, "gated": int(spec.kind == "gate_up")})
    assert weight.zero is None and weight.order is None and not weight.e2m1
    tensors = {"codes": paired(weight.codes) if weight.bits == 4 else weight.codes, "scale": weight.scale}
    return Kept(tensors if weight.bias is None else tensors | {"bias": weight.bias}, sizes | {"panels": 0})


def pack_kept(spec: LinearSpec, kept: Kept, input_quant: Literal["int8", "fp8"] | None, target: Target) -> PackedLinear:
    """As :func:`pack_quantized`, of what :func:`to_keep` made for a device like this one."""
    sizes, tensors = dict(kept.sizes), dict(kept.tensors)
    out_features, in_features, group, bits = (sizes[n] for n in ("out_features", "in_features", "group", "bits"))
    floating = bool(sizes["floating"])
    if sizes["panels"]:
        gated = bool(sizes["gated"])
        panels = integer_linear.Panels(out_features, in_features, group, bits, floating, gated, **tensors)
        return integer_linear.pack_panels(panels, input_quant or "bf16")
    codes = unpaired(tensors["codes"], in_features) if bits == 4 else tensors["codes"]
    weight = QuantizedWeight(codes, tensors["scale"], group, bits, bias=tensors.get("bias"), input_quant=input_quant)
    return pack_quantized(spec, weight, target)


@cache
def _code() -> str:
    """Of the code that rounds and lays out: a number that is to be raised with every change would be forgotten."""
    folders = (Path(file).parent for file in (__file__, integer_linear.__file__))
    sources = [*(source for folder in folders for source in sorted(folder.glob("*.py"))), Path(quantized.__file__)]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
