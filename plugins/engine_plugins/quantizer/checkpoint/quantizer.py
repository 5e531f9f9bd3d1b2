"""``quantizer=checkpoint``: linear layers as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import (
    UNQUANTIZED,
    KVScaleNames,
    PlainWeight,
    QuantizedWeight,
    StoredHeader,
    StoredTensor,
    WeightFormat,
)
from engine.kernels.quantized import joined
from engine.kernels.triton.fp8_units import multiplies_fp8
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.layouts import LAYOUTS
from engine_plugins.quantizer.checkpoint.layouts.rule import TensorRule
from engine_plugins.quantizer.checkpoint.methods import recipe_of
from engine_plugins.quantizer.checkpoint.scheme import Activations, Recipe, Scheme
from engine_plugins.quantizer.unquantized import joined_bias, joined_weight

PLAIN = Recipe("none", lambda name, is_head: None, has_kv_scales=False)
SHOWN = 4
"""Parts of a layer that an error names."""


class FromCheckpoint:
    """See :class:`engine.contracts.quantizer.Quantizer`, ``CheckingQuantizer``, ``UnpackingQuantizer``,
    ``KVScaleReader``."""

    def __init__(self, config: CheckpointConfig, context: BuildContext) -> None:
        quantization = context.model.quantization
        recipe = PLAIN if quantization is None else recipe_of(quantization)
        if recipe.problems:
            raise ValueError("; ".join(recipe.problems))
        self._recipe = recipe
        self._scheme_named = cache(recipe.scheme_of)
        self._wanted = config.activations
        self._context = context
        self.lossless = all(self._activations(scheme) == "bf16" for scheme in recipe.schemes)

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        scheme = self._scheme(spec)
        if scheme is None:
            return UNQUANTIZED
        return [rule.stored for rule in LAYOUTS[scheme.layout].rules(scheme, spec.parts[0], spec)]

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        scheme = self._scheme(spec)
        if scheme is None:
            return None
        activations = self._activations(scheme)
        return WeightFormat(
            scheme.bits,
            scheme.group_size(spec.whole.in_features),
            scheme.floating,
            zeros=not scheme.symmetric,
            ordered=scheme.ordered,
            scale_bytes=scheme.scale_bytes,
            input_quant=None if activations == "bf16" else activations,
        )

    def pack(
        self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str
    ) -> PlainWeight | QuantizedWeight:
        scheme = self._scheme(spec)
        if scheme is None:
            return PlainWeight(joined_weight(parts), joined_bias(parts))
        activations = self._activations(scheme)
        return replace(
            _read(scheme, spec, parts),
            input_quant=None if activations == "bf16" else activations,
            note=f"{scheme.label}; {self._about(scheme, activations)}",
        )

    def unpacked(self, spec: LinearSpec, part: Mapping[str, Tensor]) -> Tensor:
        scheme = self._scheme(spec)
        return part["weight"].float() if scheme is None else _read(scheme, spec, [part]).dense()

    def problems(self, specs: Sequence[LinearSpec], headers: Mapping[str, StoredHeader]) -> Sequence[str]:
        return [problem for spec in specs for problem in self._problems(spec, headers)]

    def kv_scale_names(self, qkv: LinearSpec) -> KVScaleNames:
        if self._context.model.quantization is None:
            return KVScaleNames()
        names = [part.name for part in qkv.parts]
        attention = names[0].rpartition(".")[0]
        # A projection that is fused in the checkpoint, or one to latents, has no outputs of keys alone.
        of_keys, of_values = ((name,) for name in names[-2:]) if len(names) > 1 else ((), ())
        key, value = (
            (
                f"{attention}.{kind}_scale",
                f"{attention}.attn.{kind}_scale",
                *(f"{name}.{suffix}" for name in of_kind for suffix in (f"{kind}_scale", "output_scale")),
                f"{attention}.kv_scale",
            )
            for kind, of_kind in (("k", of_keys), ("v", of_values))
        )
        unused = tuple(
            f"{attention}.{module}{name}" for module in ("", "attn.") for name in
            ("q_scale", "q_zero_point", "k_zero_point", "v_zero_point", "prob_scale", "prob_output_scale")
        )  # fmt: skip
        if self._recipe.has_kv_scales:
            return KVScaleNames(key, value, unused)
        return KVScaleNames(ignored=key + value + unused)

    def _scheme(self, spec: LinearSpec) -> Scheme | None:
        """How all parts of a layer are stored."""
        if spec.kind == "head" and self._context.model.tie_embeddings:
            return None
        schemes = self._schemes(spec)
        if len(set(schemes)) > 1:
            raise CheckpointError(_different(spec, schemes))
        return schemes[0]

    def _schemes(self, spec: LinearSpec) -> list[Scheme | None]:
        return [self._scheme_of(part, spec.kind == "head") for part in spec.parts]

    def _scheme_of(self, part: LinearPart, is_head: bool) -> Scheme | None:
        scheme = self._scheme_named(part.name, is_head)
        # Libraries that store words along the output leave a single one, a gate, alone and do not say so.
        return None if scheme is not None and scheme.in_words and part.out_features == 1 else scheme

    def _problems(self, spec: LinearSpec, headers: Mapping[str, StoredHeader]) -> Iterator[str]:
        schemes = self._schemes(spec)
        if len(set(schemes)) > 1:
            yield _different(spec, schemes)
            return
        scheme = schemes[0]
        for part in spec.parts:
            if scheme is None:
                yield from _quantized_after_all(part.name, headers)
                continue
            rules = LAYOUTS[scheme.layout].rules(scheme, part, spec)
            yield from _broken(part.name, rules, headers)
            named = [f"{part.name}.{name}" for name in scheme.scale_names]
            if len(named) > 1 and not any(name in headers for name in named):
                yield f"{part.name} has no scale: expected {' or '.join(named)}"

    def _activations(self, scheme: Scheme) -> Activations:
        """What rows are rounded to before they meet these weights."""
        matching: Activations = "fp8" if scheme.floating else "int8"
        if self._wanted != "auto":
            return matching if self._wanted == matching else "bf16"
        if scheme.activations == "fp8" and not multiplies_fp8(self._context.device):
            return "bf16"
        return scheme.activations

    def _about(self, scheme: Scheme, activations: str) -> str:
        """For the plan: what happens to activations, and why not what the checkpoint says."""
        if activations != "bf16":
            return f"{activations} activations"
        if scheme.activations == "fp8" and not multiplies_fp8(self._context.device):
            return "FP8 is storage only: this device does not multiply it"
        return "weights only"


def _read(scheme: Scheme, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]]) -> QuantizedWeight:
    """All parts of a layer as one weight."""
    layout, share = LAYOUTS[scheme.layout], spec.share
    rows = [None] * len(spec.parts) if share is None or share.columns is not None else share.rows
    try:
        return joined(
            [
                layout.read(scheme, part.name, _checked(part.name, part.bias, tensors), spec.whole.in_features, here)
                for part, tensors, here in zip(spec.parts, parts, rows, strict=True)
            ]
        )
    except CheckpointError:
        raise
    except ValueError as error:
        names = [part.name for part in spec.parts]
        if len(names) > SHOWN:
            names[SHOWN - 1 : -1] = [f"{len(names) - SHOWN} more"]
        raise CheckpointError(f"{', '.join(names)}: {error}") from error


def _checked(name: str, has_bias: bool, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Without a bias that the architecture does not have, which must be zero."""
    if has_bias or "bias" not in tensors:
        return tensors
    if bool(tensors["bias"].any()):
        raise CheckpointError(f"{name}.bias is not zero, but the architecture has no bias there")
    return {suffix: tensor for suffix, tensor in tensors.items() if suffix != "bias"}


def _different(spec: LinearSpec, schemes: Sequence[Scheme | None]) -> str:
    how = (f"{part.name} is {'not quantized' if s is None else s.label}" for part, s in zip(spec.parts, schemes))
    return f"layers that are multiplied together must be stored in the same way: {', '.join(how)}"


def _broken(name: str, rules: Sequence[TensorRule], headers: Mapping[str, StoredHeader]) -> Iterator[str]:
    for rule in rules:
        full = f"{name}.{rule.stored.suffix}"
        if full in headers:
            yield from rule.broken_by(full, headers[full])


def _quantized_after_all(name: str, headers: Mapping[str, StoredHeader]) -> Iterator[str]:
    """A layer that is said to be left alone must not be in 8 bits or in words."""
    weight = headers.get(f"{name}.weight")
    if weight is not None and weight.dtype not in ("float64", "float32", "bfloat16", "float16"):
        yield f"{name}.weight is {weight.dtype}, but the configuration says that this layer is not quantized"
    for suffix in ("qweight", "weight_packed", "blocks"):
        if f"{name}.{suffix}" in headers:
            yield f"{name}.{suffix} is there, but the configuration says that this layer is not quantized"
